"""Nothing on the page is cut off: at every width, in light and dark, however long the names are."""

import json
import urllib.request
from typing import Any

import pytest

from compat_tests.dashboard.conftest import ADMIN, looking

LONG = "mlx-community/Qwen3-Coder-480B-A35B-Instruct-with-a-name-that-has-no-end-4bit-DWQ"
STAGES = (
    *("load", "parse", "tokenise", "queue", "compile"),
    *("lane", "prefill", "decode", "inference", "serialise"),
)
WIDTHS = (320, 400, 768, 901, 1024, 1280, 1440)
# Parts of the page that hide something of what is in them, and do not show that they scroll.
CUT_OFF = """() => [...document.querySelectorAll("header, header *, main, main *, footer *")]
    .filter((part) => part.getClientRects().length && !part.matches(".unseen, textarea, svg *"))
    .filter((part) => getComputedStyle(part).overflowX !== "visible")
    .filter((part) => part.scrollWidth > part.clientWidth + 1)
    .map((part) => `${part.tagName} ${part.className} ${part.textContent.slice(0, 60)}`)"""
OUTSIDE = """() => [...document.querySelectorAll("button, select, textarea, td, th, .sub, h2, p")]
    .filter((part) => part.getClientRects().length && !part.querySelector(".unseen"))
    .filter((part) => !part.matches("dialog *"))
    .filter((part) => {
      const { left, right } = part.getBoundingClientRect();
      const room = (part.closest("section") ?? document.documentElement).getBoundingClientRect();
      return left < room.left - 1 || right > Math.min(room.right, innerWidth) + 1;
    })
    .map((part) => `${part.tagName} ${part.textContent.slice(0, 60)}`)"""


def crowd(url: str) -> dict[str, Any]:
    """Return a sample of the gateway's with long names, errors in rows and requests in flight."""
    request = urllib.request.Request(f"{url}/admin/samples")
    request.add_header("authorization", f"Bearer {ADMIN}")
    with urllib.request.urlopen(request) as answer:
        sample: dict[str, Any] = json.loads(answer.readline())
    [chat] = [model for model in sample["models"] if model["id"] == "demo-chat"]
    stages: dict[str, Any] = {"edges": [0.1, 1.0], "series": []}
    sample["histograms"]["gateway_stage_seconds"] = stages
    states = ("loaded", "loading", "failed", "unloaded")
    for number in range(20):
        state = states[number % 4]
        error = f"Cannot load {LONG}: {'/'.join(['folder'] * 20)} has no config.json." * 2
        sample["models"].append(
            chat
            | {"id": f"{LONG}-{number}", "state": state, "pinned": True, "bytes": 10**12}
            | {"aliases": [LONG, "gpt-4o-mini"], "error": error if state == "failed" else None}
        )
        labels = {"model": f"{LONG}-{number}"}
        for name in ("gateway_queue_tokens", "gateway_prompt_tokens_total", "gateway_rows"):
            sample["values"].setdefault(name, []).append([labels, 123_456_789])
        for stage in STAGES:
            where = {**labels, "route": "/v1/chat/completions", "stage": stage}
            stages["series"].append([where, [0, 6, 7], 1.0])
    sample["requests"] = [
        {
            "number": number,
            "request_id": "r" * 120,
            "method": "POST",
            "route": "/v1/chat/completions",
            "key": None,
            "model": LONG,
            "stage": "prefill",
            "age_s": 1234.5,
            "tokens_in": 123_456,
            "tokens_out": 123_456,
            "is_cancelled": number % 2 == 1,
        }
        for number in range(8)
    ]
    sample["errors"] = [
        {
            "at": 1e9 + number,
            "request_id": "r" * 120,
            "status": 503,
            "code": "context_length_exceeded",
            "method": "POST",
            "route": "/v1/chat/completions",
            "model": LONG,
            "ms": 123_456.0,
        }
        for number in range(8)
    ]
    return sample


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut_off(browser: Any, url: str, width: int, scheme: str) -> None:
    """An admin sees each button, table cell and text whole, and can hit each button."""
    line = json.dumps(crowd(url)) + "\n"
    viewport = {"width": width, "height": 900}
    with looking(browser, url, ADMIN, viewport=viewport, color_scheme=scheme) as page:
        page.route("**/admin/samples", lambda route: route.fulfill(body=line))
        page.reload()
        page.locator("#requests tbody tr").nth(7).wait_for()
        rows = {name: page.locator(f"#{name} tbody tr").count() for name in ("stages", "errors")}
        assert rows == {"stages": 20, "errors": 8}
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(CUT_OFF) == []
        assert page.evaluate(OUTSIDE) == []
        assert page.locator("#models tbody button").count() == 2 * len(json.loads(line)["models"])
        for table, text in [("#models", "unload"), ("#models", "unpin"), ("#requests", "cancel")]:
            button = page.locator(f"{table} tbody button", has_text=text).last
            button.click(trial=True)
            box = button.bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width


@pytest.mark.parametrize("width", [320, 400])
def test_on_a_phone_each_value_says_what_it_is(browser: Any, url: str, width: int) -> None:
    """The head of a table is not seen there: its names stand above the values."""
    line = json.dumps(crowd(url)) + "\n"
    with looking(browser, url, ADMIN, viewport={"width": width, "height": 900}) as page:
        page.route("**/admin/samples", lambda route: route.fulfill(body=line))
        page.reload()
        page.locator("#requests tbody tr").nth(7).wait_for()
        names = page.evaluate(
            """() => ["#models", "#requests", "#errors", "#stages"].map((table) =>
                [...document.querySelectorAll(`${table} tbody tr:last-child td`)]
                    .map((cell) => getComputedStyle(cell, "::before").content))"""
        )
    for table, expected in zip(names, ["Memory", "Age", "Status", "prefill"], strict=True):
        assert f'"{expected}"' in table
