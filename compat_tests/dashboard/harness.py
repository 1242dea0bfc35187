"""Questions that tests of the dashboard ask the gateway itself."""

import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

QUESTION = "What is the capital of France?"


def ask(url: str, path: str, body: dict[str, Any], key: str = "unused") -> Any:
    headers = {"authorization": f"Bearer {key}"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "demo-chat", "messages": [{"role": "user", "content": QUESTION}], **more}


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {
        series: float(value)
        for series, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


def soon(check: Callable[[], None]) -> None:
    """Check until it holds: the page is a second behind."""
    until = time.monotonic() + 20
    while True:
        try:
            check()
        except AssertionError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
        else:
            return


def wait_until(page: Any, expression: str) -> None:
    """Wait until JavaScript is true. The page's CSP forbids Playwright's own wait to ask twice."""
    for _ in range(1000):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(30)
    raise AssertionError(expression)
