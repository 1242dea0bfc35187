"""The chat: thoughts are folded, ends explained, conversations kept, texts copied, options sent."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from compat_tests.dashboard.conftest import ADMIN, looking
from compat_tests.dashboard.harness import QUESTION, wait_until

WIDTHS = pytest.mark.parametrize("width", [1280, 400])
# The test writes the answers: `feed` a line, then `finish`. `asked` lists the requests' bodies.
STUB = """
const real = window.fetch;
window.asked = [];
window.fetch = (address, given) => {
  if (!String(address).endsWith("/v1/chat/completions")) return real(address, given);
  asked.push(JSON.parse(given.body));
  const body = new ReadableStream({
    start(stream) {
      window.feed = (text) => stream.enqueue(new TextEncoder().encode(text));
      window.finish = () => stream.close();
      const left = new DOMException("", "AbortError");
      given.signal.addEventListener("abort", () => stream.error(left));
    },
  });
  return Promise.resolve(new Response(body));
};"""
LONG = "a/" * 150


@contextmanager
def scripted(browser: Any, url: str, width: int = 1280, **options: Any) -> Iterator[Any]:
    """Open the page with answers that the test writes."""
    with looking(browser, url, ADMIN, viewport={"width": width, "height": 900}, **options) as page:
        page.add_init_script(STUB)
        page.reload()
        page.locator("#chat option", has_text="demo-chat").wait_for(state="attached")
        yield page


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    with scripted(browser, url) as page:
        yield page


def ask(page: Any, text: str = QUESTION) -> None:
    """Send a message, and wait until the gateway has it."""
    count = page.evaluate("asked.length")
    page.fill("#chat [name=text]", text)
    page.locator("#chat [name=text]").press("Enter")
    wait_until(page, f"asked.length > {count}")


def feed(page: Any, reason: str | None = None, **delta: str) -> None:
    event = {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
    page.evaluate("feed", f"data: {json.dumps(event)}\n\n")


def answered(page: Any, text: str, reason: str = "stop") -> None:
    feed(page, content=text)
    feed(page, reason)
    page.evaluate("finish()")
    page.locator("#chat .turn.assistant").last.locator(".foot").wait_for()


def foot(page: Any) -> str:
    """Return what is said of why the last answer ended."""
    page.locator("#chat .stop").wait_for(state="hidden")
    text: str = page.locator("#chat .turn.assistant .foot span").last.text_content()
    return text


def sent(page: Any) -> Any:
    return page.evaluate("asked.at(-1)")


def turns(page: Any) -> list[str]:
    texts: list[str] = page.locator("#chat :is(.said, .words)").all_text_contents()
    return texts


def test_a_thought_is_followed_and_folds_when_the_answer_begins(page: Any) -> None:
    ask(page)
    for number in range(60):
        feed(page, reasoning_content=f"- step **{number}**\n")
    thought = page.locator("#chat .thought")
    page.locator("#chat .thought li", has_text="step 59").wait_for()
    assert thought.evaluate("one => one.open")
    assert thought.locator("summary").text_content() == "Thinking …"
    assert page.locator("#chat .turns").evaluate(
        "one => one.scrollHeight > one.clientHeight"
        " && one.scrollHeight - one.scrollTop - one.clientHeight < 40"
    )
    feed(page, content="Paris.")
    page.locator("#chat .words", has_text="Paris.").wait_for()
    assert not thought.evaluate("one => one.open")
    assert thought.locator("summary").text_content().startswith("Thought for ")
    thought.locator("summary").press("Enter")
    assert thought.locator("li").last.is_visible()
    answered(page, " Yes.")
    assert thought.evaluate("one => one.open")  # what was opened by hand stays so
    assert page.evaluate("asked.length") == 1
    ask(page, "Thanks")
    assert sent(page)["messages"][1] == {"role": "assistant", "content": "Paris. Yes."}


def test_one_who_reads_further_up_is_not_moved(page: Any) -> None:
    ask(page)
    feed(page, content="line\n\n" * 60)
    page.locator("#chat .words p").nth(59).wait_for()
    page.locator("#chat .turns").evaluate("one => { one.scrollTop = 10; }")
    feed(page, content="line\n\n" * 20)
    page.locator("#chat .words p").nth(79).wait_for()
    assert page.locator("#chat .turns").evaluate("one => one.scrollTop") == 10


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("stop", "The model ended its answer."),
        ("length", "Cut off: as many tokens as max_tokens, or the model’s context, allow."),
        ("tool_calls", "The model calls a tool, which this page does not run."),
        ("other", "It ended with “other”."),
    ],
)
def test_why_an_answer_ended_is_said(page: Any, reason: str, said: str) -> None:
    ask(page)
    answered(page, "Paris.", reason)
    assert foot(page) == said


@pytest.mark.parametrize("how", ["the button", "Escape", "Escape at Send", "Escape elsewhere"])
def test_an_answer_is_stopped_and_what_was_written_is_part_of_the_talk(page: Any, how: str) -> None:
    if how == "Escape at Send":
        page.fill("#chat [name=text]", QUESTION)
        page.get_by_role("button", name="Send").click()
    else:
        ask(page)
    feed(page, content="Par")
    page.locator("#chat .words", has_text="Par").wait_for()
    if how == "Escape at Send":
        assert page.evaluate("document.activeElement.textContent") == "Send"
    if how == "Escape elsewhere":
        page.locator("h1").click()
    if how.startswith("Escape"):
        page.keyboard.press("Escape")
    else:
        page.locator("#chat .stop").press("Enter")
    assert foot(page) == "You stopped it."
    assert page.evaluate("document.activeElement.name") == "text"
    ask(page, "Go on")
    assert [each["content"] for each in sent(page)["messages"]] == [QUESTION, "Par", "Go on"]


def test_a_button_keeps_the_focus_and_sends_once(page: Any) -> None:
    """While an answer is written, Send does nothing; Stop, once it is gone, leads to the field."""
    page.get_by_role("button", name="Send").focus()
    for _ in range(3):
        page.keyboard.press("Enter")
    feed(page, content="Par")
    page.locator("#chat .words", has_text="Par").wait_for()
    assert page.evaluate("document.activeElement.textContent") == "Send"
    assert page.evaluate("asked.length") == 1
    page.locator("#chat .stop").focus()
    answered(page, "is.")
    page.locator("#chat .stop").wait_for(state="hidden")
    assert page.evaluate("document.activeElement.name") == "text"


def test_an_empty_line_asks_the_example_only_at_the_beginning(page: Any) -> None:
    page.fill("#chat [name=text]", "  ")
    page.locator("#chat [name=text]").press("Enter")
    answered(page, "Paris.")
    page.locator("#chat .stop").wait_for(state="hidden")
    page.locator("#chat [name=text]").press("Enter")
    ask(page, "And of Italy?")
    assert [each["content"] for each in sent(page)["messages"]] == [
        QUESTION, "Paris.", "And of Italy?"
    ]  # fmt: skip


def test_a_conversation_cleared_in_mid_answer_leaves_nothing(page: Any) -> None:
    ask(page)
    feed(page, content="Par")
    page.locator("#chat .words", has_text="Par").wait_for()
    page.locator("#chat .clear").click()
    page.locator("#chat .stop").wait_for(state="hidden")
    assert turns(page) == []
    assert page.locator("#chat .result").text_content() == ""


@pytest.mark.parametrize("width", [1280, 400])
def test_the_words_of_a_table_stay_whole(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    ask(page)
    words = ["Continuous", "partially", "Schema", "applicable", "documentation"]
    answered(page, f"|{'|'.join(words)}|\n|{'-|' * 5}\n|{'|'.join(words)}|\n")
    heights = page.locator("#chat .words :is(th, td)").evaluate_all(
        "cells => cells.map((cell) => { const range = document.createRange();"
        " range.selectNodeContents(cell); return range.getClientRects().length; })"
    )
    assert heights == [1] * 10
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_an_answer_that_ends_in_an_error_says_which(page: Any) -> None:
    """Without a word of an answer, the question is no part of the conversation, which is said."""
    for text, ending in [("Par", "Ended by an error: Out of luck."), ("", "is no part of the")]:
        ask(page)
        if text:
            feed(page, content=text)
        error = {"error": {"code": "x", "message": "Out of luck."}}
        page.evaluate("feed", f"data: {json.dumps(error)}\n\n")
        page.locator("#chat .result.wrong", has_text="Out of luck.").wait_for()
        assert ending in foot(page)
    ask(page, "Again")
    assert [each["content"] for each in sent(page)["messages"]] == [QUESTION, "Par", "Again"]


def test_the_conversation_survives_a_reload_until_it_is_cleared(page: Any) -> None:
    ask(page)
    feed(page, reasoning_content="Hm.")
    answered(page, "**Paris**.", "length")
    page.reload()
    assert turns(page) == [QUESTION, "Paris."]
    assert page.locator("#chat .words strong").text_content() == "Paris"
    assert "Cut off" in foot(page)
    assert page.locator("#chat .thought").text_content().endswith("Hm.")
    assert not page.locator("#chat .thought").evaluate("one => one.open")
    page.locator("#chat option", has_text="demo-chat").wait_for(state="attached")
    ask(page, "Thanks")
    roles = [(each["role"], each["content"]) for each in sent(page)["messages"]]
    assert roles == [("user", QUESTION), ("assistant", "**Paris**."), ("user", "Thanks")]
    page.get_by_role("button", name="Clear").click()
    page.reload()
    assert turns(page) == []


def test_of_a_long_conversation_the_end_is_kept_which_is_said(page: Any) -> None:
    for number in range(3):
        ask(page, f"Question {number}")
        answered(page, f"{number} " + "x" * 900_000)
    page.reload()
    page.get_by_text("Earlier messages were too long to be kept over the reload.").wait_for()
    questions = page.locator("#chat .said").all_text_contents()
    assert questions == ["Question 1", "Question 2"]


def test_what_another_version_kept_is_forgotten(page: Any, url: str) -> None:
    page.goto(f"{url}/docs")
    page.evaluate("sessionStorage.setItem('mlx-gateway.chat', '{\"turns\": 7}')")
    page.goto(f"{url}/dashboard")
    page.locator("#chat option", has_text="demo-chat").wait_for(state="attached")
    assert page.evaluate("sessionStorage.getItem('mlx-gateway.chat')") is None
    ask(page)
    assert len(sent(page)["messages"]) == 1


def test_a_system_prompt_and_sampling_are_sent_if_they_are_given(page: Any) -> None:
    ask(page)
    answered(page, "Paris.")
    asked = {"model", "messages", "stream", "stream_options"}
    assert sent(page).keys() == asked
    page.get_by_text("System prompt and sampling").click()
    given = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 12, "seed": 7}
    for name, value in {"system": "Be brief.", **given}.items():
        page.fill(f"#chat [name={name}]", str(value))
    page.reload()
    page.locator("#chat option", has_text="demo-chat").wait_for(state="attached")
    ask(page, "Again")
    assert {name: sent(page)[name] for name in given} == given
    assert sent(page)["messages"][0] == {"role": "system", "content": "Be brief."}
    answered(page, "Paris.")
    page.fill("#chat [name=max_tokens]", "0")
    page.get_by_text("System prompt and sampling").click()
    page.locator("#chat [name=text]").press("Enter")  # the field that is wrong is shown
    wait_until(page, "document.activeElement.name === 'max_tokens'")
    assert page.evaluate("asked.length") == 1


def test_an_answer_and_its_code_are_copied(browser: Any, url: str) -> None:
    text = "Use **this**:\n```py\na = 1\n```\n"
    with scripted(browser, url, permissions=["clipboard-read", "clipboard-write"]) as page:
        ask(page)
        answered(page, text)
        for place, copied in [(".code .copy", "a = 1\n"), (".foot .copy", text)]:
            page.locator(f"#chat {place}").press("Enter")
            page.locator(f"#chat {place}", has_text="Copied").wait_for()
            assert page.evaluate("navigator.clipboard.readText()") == copied


def test_without_a_clipboard_what_is_copied_is_selected(browser: Any, url: str) -> None:
    """Beyond localhost and TLS a browser has none."""
    with scripted(browser, url, permissions=["clipboard-read"]) as page:
        ask(page)
        answered(page, "`a = 1`")
        page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
        page.locator("#chat .foot .copy").click()
        page.locator("#chat .foot .copy", has_text="Copied").wait_for()
        assert page.evaluate("String(getSelection())") == "a = 1"


@WIDTHS
def test_the_panel_is_wide_when_asked_and_stays_so(browser: Any, url: str, width: int) -> None:
    with scripted(browser, url, width) as page:
        before = page.locator("#try-it").bounding_box()["width"]
        button = page.get_by_role("button", name="Wide")
        button.click()
        after = page.locator("#try-it").bounding_box()["width"]
        assert after >= before
        assert after >= width - 42
        page.reload()
        assert button.get_attribute("aria-pressed") == "true"
        assert page.locator("#try-it").bounding_box()["width"] == after
        button.click()
        assert page.locator("#try-it").bounding_box()["width"] == before


@WIDTHS
def test_no_answer_is_wider_than_the_panel(browser: Any, url: str, width: int) -> None:
    text = f"{LONG}\n\n```\n{LONG}\n```\n\n|a|b|c|\n|-|-|-|\n|{LONG}|b|{LONG}|\n\n- {LONG}\n"
    with scripted(browser, url, width) as page:
        ask(page, LONG)
        feed(page, reasoning_content=LONG)
        answered(page, text)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        wide = page.locator("#chat .turn").evaluate_all(
            "all => all.filter((one) => one.scrollWidth > one.clientWidth + 1).length"
        )
        assert wide == 0
        assert page.locator("#chat .code .copy").is_visible()
