"""The panel takes pictures for a model that reads them: chosen, pasted, dropped, by keyboard."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml

from compat_tests.conftest import started
from compat_tests.dashboard.conftest import HOSTILE, MODELS, looking
from compat_tests.dashboard.harness import wait_until
from tests.engine.vision.harness import write_seeing
from tests.processes import ROOT

PICTURE = ROOT / "tests" / "golden" / "vision" / "wide.png"
WIDTHS = pytest.mark.parametrize("width", [1280, 400])
GIVE = """([event, name, type, size, bytes]) => {
  const given = new DataTransfer();
  const content = new Uint8Array(size);
  content.set([...atob(bytes)].map((each) => each.charCodeAt(0)));
  given.items.add(new File([content], name, { type }));
  const data = event === "paste" ? { clipboardData: given } : { dataTransfer: given };
  const about = { bubbles: true, cancelable: true, ...data };
  const made = event === "paste" ? new ClipboardEvent(event, about) : new DragEvent(event, about);
  document.querySelector("#chat [name=text]").dispatchEvent(made);
  return made.defaultPrevented;
}"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a tiny model that sees, whose words mean nothing, and one that reads text."""
    folder = tmp_path_factory.mktemp("pictures")
    write_seeing("qwen3_vl", folder / "model")
    sampling = {"temperature": 0}
    seeing = {"kind": "chat", "source": "path:model", "preload": True, "sampling": sampling}
    models = {"seeing": seeing, "demo-chat": MODELS["demo-chat"]}
    (folder / "models.yaml").write_text(yaml.safe_dump({"version": 1, "models": models}))
    with started(folder, folder / "models.yaml") as address:
        yield address


@contextmanager
def chatting(browser: Any, url: str, model: str = "seeing", width: int = 1280) -> Iterator[Any]:
    """Open the page with a model chosen; `page.asked` lists the bodies that it sends."""
    with looking(browser, url, viewport={"width": width, "height": 900}) as page:
        page.asked = []

        def note(request: Any) -> None:
            if request.method == "POST":
                page.asked.append(json.loads(request.post_data))

        page.on("request", note)
        page.locator("#chat option", has_text="seeing").wait_for(state="attached")
        page.select_option("#chat select", model)
        page.get_by_text("System prompt and sampling").click()
        page.fill("#chat [name=max_tokens]", "16")  # words without a meaning have no end
        page.get_by_text("System prompt and sampling").click()
        if model == "seeing":
            page.get_by_role("button", name="Add a picture").wait_for()
        yield page


def give(
    page: Any,
    event: str,
    name: str = "wide.png",
    kind: str = "image/png",
    size: int = 0,
    content: bytes = b"",
) -> bool:
    """Paste or drop a file onto the message; return whether the page took it."""
    digits = base64.b64encode(content).decode()
    taken: bool = page.evaluate(GIVE, [event, name, kind, size or len(content), digits])
    return taken


def thumbnails(page: Any) -> int:
    count: int = page.locator("#chat .pictures img").count()
    return count


def sent(page: Any) -> Any:
    """Return the content of the last message, once its answer is there."""
    page.locator("#chat .result", has_text="completion tokens").wait_for()
    return page.asked[-1]["messages"][-1]["content"]


def file_of(part: Any) -> bytes:
    url: str = part["image_url"]["url"]
    assert url.startswith("data:image/png;base64,")
    return base64.b64decode(url.partition(",")[2])


@WIDTHS
def test_a_picture_is_chosen_by_keyboard_shown_and_sent(browser: Any, url: str, width: int) -> None:
    with chatting(browser, url, width=width) as page:
        page.on("filechooser", lambda chooser: chooser.set_files(PICTURE))
        page.locator("#chat [name=text]").focus()
        for _ in range(6):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent") == "Add a picture":
                break
        assert page.evaluate("document.activeElement.textContent") == "Add a picture"
        page.keyboard.press("Enter")
        thumbnail = page.locator("#chat .pictures img")
        thumbnail.wait_for()
        assert thumbnail.get_attribute("src").startswith("blob:")
        wait_until(page, "document.querySelector('#chat .pictures img').naturalWidth > 0")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        box = page.locator("#chat .pictures button").bounding_box()
        assert box["x"] + box["width"] <= width
        page.locator("#chat [name=text]").focus()
        page.keyboard.type("Which colour?")
        page.keyboard.press("Enter")
        image, text = sent(page)
        assert file_of(image) == PICTURE.read_bytes()
        assert text == {"type": "text", "text": "Which colour?"}
        assert thumbnails(page) == 0
        assert page.locator("#chat .turn.user img").get_attribute("alt") == "wide.png"
        page.keyboard.type("And now?")
        page.keyboard.press("Enter")
        wait_until(page, "document.querySelectorAll('#chat .turn.user').length === 2")
        page.locator("#chat .result", has_text="completion tokens").wait_for()
        first, *_, last = page.asked[-1]["messages"]
        assert (first["content"], last["content"]) == ([image, text], "And now?")
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@WIDTHS
@pytest.mark.parametrize("event", ["paste", "drop"])
def test_a_picture_is_pasted_or_dropped(browser: Any, url: str, width: int, event: str) -> None:
    """Without words it is asked about all the same; its name is no markup."""
    with chatting(browser, url, width=width) as page:
        assert give(page, event, name=f"{HOSTILE}.png", content=PICTURE.read_bytes())
        assert thumbnails(page) == 1
        page.locator("#chat [name=text]").press("Enter")
        image, text = sent(page)
        assert file_of(image) == PICTURE.read_bytes()
        assert text["text"] == "What does this show?"
        assert page.title() == "mlx-gateway"


def test_a_picture_is_removed_by_keyboard(browser: Any, url: str) -> None:
    with chatting(browser, url) as page:
        give(page, "paste", "one.png", content=PICTURE.read_bytes())
        give(page, "paste", "other.png", content=PICTURE.read_bytes())
        assert thumbnails(page) == 2
        for name in ("one", "other"):
            page.get_by_role("button", name=f"Remove {name}.png").press("Enter")
        assert thumbnails(page) == 0
        assert page.evaluate("document.activeElement.name") == "text"
        page.keyboard.type("Hello")
        page.keyboard.press("Enter")
        assert sent(page) == "Hello"


def test_no_picture_is_offered_or_sent_to_a_model_that_reads_text(browser: Any, url: str) -> None:
    """One that was chosen before the model stays, and is not left out in silence."""
    with chatting(browser, url) as page:
        add, hint = page.get_by_role("button", name="Add a picture"), page.locator(".picture-hint")
        assert add.is_visible()
        assert "20 MiB" in hint.text_content()
        give(page, "drop", content=PICTURE.read_bytes())
        page.select_option("#chat select", "demo-chat")
        assert not add.is_visible()
        assert not hint.is_visible()
        page.locator("#chat [name=text]").press("Enter")
        page.get_by_text("remove them, or choose another model").wait_for()
        assert page.asked == []
        assert thumbnails(page) == 1
        page.get_by_role("button", name="Remove wide.png").click()
        assert give(page, "paste", content=PICTURE.read_bytes())
        page.get_by_text("This model reads no pictures.").wait_for()
        assert thumbnails(page) == 0


def test_a_conversation_with_a_picture_goes_on_with_a_model_that_reads_text(
    browser: Any, url: str
) -> None:
    """The panel says what that model was not shown; one that sees is shown it again."""
    with chatting(browser, url) as page:
        result, left_out = page.locator("#chat .result"), "as this model reads text: 1"
        give(page, "paste", content=PICTURE.read_bytes())
        page.locator("#chat [name=text]").press("Enter")
        sent(page)
        for model, is_said in (("demo-chat", True), ("seeing", False)):
            page.select_option("#chat select", model)
            page.locator("#chat [name=text]").fill(f"Hello, {model}")
            page.locator("#chat [name=text]").press("Enter")
            page.locator("#chat .turns", has_text=model).wait_for()
            assert sent(page) == f"Hello, {model}"
            assert file_of(page.asked[-1]["messages"][0]["content"][0]) == PICTURE.read_bytes()
            assert (left_out in result.text_content()) is is_said


def test_what_is_wrong_with_a_file_is_said_before_it_is_sent(browser: Any, url: str) -> None:
    with chatting(browser, url) as page:
        give(page, "drop", name="large.png", size=25 * 2**20)
        page.get_by_text("large.png has 25 MiB, and at most 20 MiB are read.").wait_for()
        give(page, "drop", name="a.pdf", kind="application/pdf", size=10)
        page.get_by_text("a.pdf is no PNG, JPEG, WEBP, GIF or BMP.").wait_for()
        assert thumbnails(page) == 0
        assert page.asked == []


def test_pictures_are_kept_over_a_reload_unless_they_are_large(browser: Any, url: str) -> None:
    with chatting(browser, url) as page:
        give(page, "paste", content=PICTURE.read_bytes())
        page.locator("#chat [name=text]").press("Enter")
        image, _ = sent(page)
        page.reload()
        kept = page.locator("#chat .turn.user img")
        kept.evaluate("image => image.decode()")
        assert kept.get_attribute("src").startswith("blob:")
        page.get_by_role("button", name="Add a picture").wait_for()
        give(page, "paste", content=PICTURE.read_bytes() + bytes(1_600_000))
        page.locator("#chat [name=text]").press("Enter")
        page.locator("#chat .foot:not([hidden])").nth(1).wait_for()
        first, *_, last = page.asked[-1]["messages"]
        assert first["content"][0] == image
        assert len(last["content"]) == 2
        page.reload()
        page.get_by_text("too large to be kept").first.wait_for()
        assert kept.count() == 0
        assert page.locator("#chat .said").count() == 2


def test_nothing_that_a_model_writes_is_fetched(browser: Any, url: str) -> None:
    """Pictures and links in its text stay text: an address could tell what was said."""
    written = "![a](http://other.test/a.png) <img src='/dashboard/b.png'> [c](/dashboard/c)"
    delta = {"choices": [{"index": 0, "delta": {"content": written}}]}
    with chatting(browser, url) as page:
        events = f"data: {json.dumps(delta)}\n\ndata: [DONE]\n\n"
        page.route("**/v1/chat/completions", lambda route: route.fulfill(body=events))
        fetched: list[str] = []
        page.on("request", lambda request: fetched.append(request.url))
        page.locator("#chat [name=text]").press("Enter")
        shown = "a (http://other.test/a.png) <img src='/dashboard/b.png'> c (/dashboard/c)"
        page.locator("#chat .turn.assistant", has_text=shown).wait_for()
        page.wait_for_timeout(300)
        assert fetched == [f"{url}/v1/chat/completions"]
        assert page.locator("#chat .turn.assistant").locator("img, a").count() == 0
