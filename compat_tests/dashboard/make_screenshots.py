"""Make docs' pictures of the dashboard anew: the shipped models under load, in Chromium.

The load lasts a minute. Run `python -m compat_tests.dashboard.make_screenshots` on an idle machine:
the figures in the pictures are its own.
"""

import itertools
import json
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from compat_tests.conftest import SHIPPED, started
from compat_tests.dashboard.conftest import ADMIN, CHROMIUM
from tests.processes import ROOT

LOAD_S = 60
WIDTH, HEIGHT = 1440, 1400
TOPICS = ("rivers", "bridges", "bread", "violins", "glaciers", "maps", "bees", "clocks")
QUESTIONS = ("Who wrote Faust?", "Where do penguins live?", "What is a fugue?")


def ask(url: str, path: str, **body: Any) -> None:
    request = urllib.request.Request(url + path, json.dumps(body).encode())
    urllib.request.urlopen(request, timeout=120).read()


def chat(url: str, topic: str) -> None:
    message = {"role": "user", "content": f"Write three sentences about {topic}."}
    ask(url, "/v1/chat/completions", model="smollm2-135m", messages=[message], max_tokens=64)


def embed(url: str, topic: str) -> None:
    """One text that the cache has after a while, and a longer one that is always new."""
    texts = [f"A text about {topic}.", f"A longer one about {topic}. " * 4 + f"{time.time()}"]
    ask(url, "/v1/embeddings", model="all-minilm-l6-v2", input=texts)


def rerank(url: str, question: str) -> None:
    ask(url, "/v1/rerank", model="all-minilm-l6-v2", query=question, documents=TOPICS)


def repeat(
    act: Callable[[str, str], None], url: str, texts: Iterable[str], pause_s: float
) -> Callable[[], None]:
    """Act on one text after the other in a thread of its own; return a function that ends it."""
    is_over = threading.Event()

    def run() -> None:
        for text in itertools.cycle(texts):
            act(url, text)
            if is_over.wait(pause_s):
                return

    thread = threading.Thread(target=run)
    thread.start()

    def end() -> None:
        is_over.set()
        thread.join()

    return end


def open_page(browser: Any, url: str, scheme: str) -> Any:
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
    page.add_init_script(f"sessionStorage.setItem('mlx-gateway.admin-key', {ADMIN!r})")
    page.goto(f"{url}/dashboard")
    page.locator("#status[data-is=good]").wait_for()
    return page


def main() -> None:
    settings = {"GATEWAY_ADMIN_KEY": ADMIN, "GATEWAY_EMBEDDING_CACHE_SIZE": "1000"}
    with (
        tempfile.TemporaryDirectory() as folder,
        started(Path(folder), SHIPPED, **settings) as url,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        light, dark = (open_page(browser, url, scheme) for scheme in ("light", "dark"))
        ends = [repeat(chat, url, TOPICS[start::2], 0.5) for start in (0, 1)]
        ends += [repeat(embed, url, TOPICS, 0.3), repeat(rerank, url, QUESTIONS, 1.0)]
        try:
            light.wait_for_timeout(1000 * LOAD_S)
            light.get_by_role("button", name="Send").click()
            dark.get_by_role("tab", name="Rerank").click()
            dark.get_by_role("button", name="Sort").click()
            light.locator("#chat .result", has_text="in total").wait_for(timeout=120_000)
            dark.locator("#rerank li").first.wait_for(timeout=120_000)
            for page, scheme in ((light, "light"), (dark, "dark")):
                last = page.locator("section", has=page.locator("#stages")).bounding_box()
                clip = {"x": 0, "y": 0, "width": WIDTH, "height": last["y"] + last["height"] + 14}
                page.screenshot(path=ROOT / "docs" / f"dashboard-{scheme}.png", clip=clip)
        finally:
            for end in ends:
                end()
            browser.close()


if __name__ == "__main__":
    main()
