"""Both pages can be used by keyboard and by screen readers, by axe-core's rules and by hand."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from compat_tests.dashboard.conftest import ADMIN, looking
from compat_tests.dashboard.test_chat import answered, ask, feed, scripted
from compat_tests.dashboard.test_docs import CHAT, opened, read
from compat_tests.node import NEEDS_NODE, install

HERE = Path(__file__).parent
SCHEMES = pytest.mark.parametrize("scheme", ["light", "dark"])
WIDTHS = pytest.mark.parametrize("width", [1280, 400])
RULES = """() => axe.run(document).then(({ violations, passes }) => [
    passes.length,
    violations.flatMap(({ id, nodes }) => nodes.map((node) => `${id}: ${node.html.slice(0, 160)}`)),
])"""
FOCUSED = """() => {
    const { outlineStyle, outlineWidth } = getComputedStyle(document.activeElement);
    const box = document.activeElement.getBoundingClientRect();
    const name = document.activeElement.name || document.activeElement.textContent.trim();
    return [name.slice(0, 30), outlineStyle, parseFloat(outlineWidth), box.width * box.height > 0];
}"""
CODE = f"```py\n{'x = 1 ' * 60}\n```\n\n"
MARKDOWN = f"# A\n\n- [b](c)\n\n{CODE}|a|b|\n|-|-|\n|`c`|~~d~~|\n\n> *e*"


@pytest.fixture(scope="module")
def axe() -> str:
    return (install(HERE) / "axe-core" / "axe.min.js").read_text()


def violations(page: Any, axe: str) -> list[str]:
    page.evaluate(axe)
    passed, found = page.evaluate(RULES)
    assert passed > 10
    names: list[str] = found
    return names


@contextmanager
def talked(browser: Any, url: str, width: int, **options: Any) -> Iterator[Any]:
    """Open the page after a conversation that has every kind of element."""
    with scripted(browser, url, width, **options) as page:
        page.locator("#requests-hint, #models tbody tr").first.wait_for()
        ask(page)
        feed(page, reasoning_content="Hm.\n\n1. a")
        answered(page, MARKDOWN, "length")
        yield page


@NEEDS_NODE
@SCHEMES
@WIDTHS
def test_the_dashboard_violates_no_rule(
    browser: Any, url: str, axe: str, width: int, scheme: str
) -> None:
    with talked(browser, url, width, color_scheme=scheme) as page:
        page.get_by_text("System prompt and sampling").click()
        page.locator("#chat .thought summary").click()
        assert violations(page, axe) == []
        for name, done in (("Embed", "Compare"), ("Rerank", "Sort")):
            page.get_by_role("tab", name=name).click()
            page.get_by_role("button", name=done).click()
            page.locator(f"#{name.lower()} .result > *").first.wait_for()
            assert violations(page, axe) == []
        page.get_by_role("button", name="Keys").click()
        assert violations(page, axe) == []


@NEEDS_NODE
@SCHEMES
@WIDTHS
def test_the_page_of_the_endpoints_violates_no_rule(
    browser: Any, url: str, axe: str, width: int, scheme: str
) -> None:
    viewport = {"width": width, "height": 900}
    with looking(browser, url, viewport=viewport, color_scheme=scheme) as page:
        read(page, url)
        found = opened(page, CHAT)
        # Each that is opened gets others inside, which would be counted before those that follow.
        for summary in found.locator("details > summary").element_handles():
            summary.click()
        assert violations(page, axe) == []


@WIDTHS
def test_the_chat_is_reached_and_used_by_keyboard(browser: Any, url: str, width: int) -> None:
    """Tab goes through it in the order of the eye, and each stop is seen."""
    with talked(browser, url, width) as page:
        page.get_by_role("tab", name="Chat").focus()
        names = []
        for _ in range(10):
            page.keyboard.press("Tab")
            name, style, size, is_there = page.evaluate(FOCUSED)
            assert (style, is_there) == ("solid", True), name
            assert size >= 2
            names.append(name)
        order = ["model", "System prompt", "Thought for", "Copy", "Copy", "text", "Send"]
        reached = iter(names)
        for each in order:
            assert any(name.startswith(each) for name in reached), (each, names)
        page.locator("#chat .thought summary").focus()
        page.keyboard.press("Enter")
        assert page.locator("#chat .thought li").is_visible()
        page.get_by_role("tab", name="Chat").focus()
        page.keyboard.press("ArrowRight")
        assert page.get_by_label("First text").is_visible()
        page.get_by_role("button", name="Wide").press("Space")
        assert page.get_by_role("button", name="Wide").get_attribute("aria-pressed") == "true"


def test_escape_closes_the_keys_and_gives_the_focus_back(browser: Any, url: str) -> None:
    with looking(browser, url, ADMIN) as page:
        page.locator("#status[data-is=good]").wait_for()
        page.get_by_role("button", name="Keys").press("Enter")
        page.locator("dialog[open]").wait_for()
        page.keyboard.press("Escape")
        page.locator("dialog[open]").wait_for(state="hidden")
        assert page.evaluate("document.activeElement.id") == "keys-button"


def test_an_answer_is_read_aloud_when_it_is_whole(browser: Any, url: str) -> None:
    with scripted(browser, url) as page:
        log = page.get_by_role("log", name="Conversation")
        ask(page)
        feed(page, content="Par")
        assert log.get_attribute("aria-busy") == "true"
        answered(page, "is.")
        assert log.get_attribute("aria-busy") is None


@WIDTHS
def test_the_endpoints_are_read_by_keyboard(browser: Any, url: str, width: int) -> None:
    with looking(browser, url, viewport={"width": width, "height": 900}) as page:
        read(page, url)
        page.get_by_label("Filter").focus()
        page.keyboard.press("Tab")
        name, style, size, is_there = page.evaluate(FOCUSED)
        assert (name.startswith("POST/v1/embeddings"), style, is_there) == (True, "solid", True)
        assert size >= 2
        page.keyboard.press("Enter")
        page.locator("#post_embeddings h3", has_text="Fields").wait_for()
        page.keyboard.press("Tab")
        assert page.evaluate(FOCUSED)[0] == "Copy"
