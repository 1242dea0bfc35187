"""The page of the endpoints says what /openapi.json says, and its commands can be run."""

import json
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from compat_tests.dashboard.conftest import ADMIN, HOSTILE, looking, serve

CHAT = "#post_chat_completions"


def described(url: str) -> Any:
    with urllib.request.urlopen(f"{url}/openapi.json") as answer:
        return json.load(answer)


def read(page: Any, url: str, fragment: str = "") -> None:
    page.goto(f"{url}/docs{fragment}")
    page.locator(fragment or ".endpoint").first.wait_for()


def opened(page: Any, endpoint: str) -> Any:
    found = page.locator(endpoint)
    if not found.evaluate("one => one.open"):
        found.locator("summary").first.press("Enter")
    found.locator("h3", has_text="Errors").wait_for()
    return found


def test_each_endpoint_is_there_with_its_fields_and_errors(browser: Any, url: str) -> None:
    document = described(url)
    with looking(browser, url) as page:
        read(page, url)
        operations = [
            operation
            for item in document["paths"].values()
            for method, operation in item.items()
            if method != "servers"
        ]
        ids = page.locator(".endpoint").evaluate_all("all => all.map((one) => one.id)")
        assert ids == [each["operationId"] for each in operations]
        for operation in operations:
            text = opened(page, f"#{operation['operationId']}").text_content()
            assert operation["summary"] in text
            for status, answer in operation["responses"].items():
                assert f"{status} {answer['description']}" in text
        commands = page.locator(".endpoint .code code").all_text_contents()
        assert len(commands) == len(operations)
        assert f"curl {url}/" in commands
        assert f"curl {url}/v1/responses/NAME \\\n  -X DELETE" in commands
        assert not [each for each in commands if "/{" in each]
        chat = page.locator(CHAT)
        names = set(document["components"]["schemas"]["ChatRequest"]["properties"])
        chat.get_by_text("Fields that are refused").click()
        chat.locator("table").nth(2).wait_for()
        shown = chat.locator("table").evaluate_all(
            "all => all.flatMap((one) => [...one.querySelectorAll('tbody th')])"
            ".map((one) => one.textContent)"
        )
        assert set(shown) == names | {"x-gateway-timeout-s"}
        model = chat.locator("tbody tr", has=page.get_by_text("model", exact=True)).first
        assert 'Required. For example "demo-chat"' in " ".join(model.text_content().split())


def test_schemas_that_contain_themselves_are_opened_one_by_one(browser: Any, url: str) -> None:
    with looking(browser, url) as page:
        read(page, url, "#post_responses")
        found = opened(page, "#post_responses")
        for depth in range(4):
            found.locator("details:not([open]) > summary").first.click()
            found.locator("details[open] > :nth-child(2)").nth(depth).wait_for()


def test_a_command_of_the_page_is_answered(browser: Any, url: str) -> None:
    with looking(browser, url, permissions=["clipboard-read", "clipboard-write"]) as page:
        read(page, url, CHAT)
        opened(page, CHAT).get_by_role("button", name="Copy").click()
        page.get_by_role("button", name="Copied").wait_for()
        command = page.evaluate("navigator.clipboard.readText()")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["object"] == "chat.completion"


def test_a_name_that_is_markup_is_a_text(browser: Any, url: str) -> None:
    """Models are examples of the fields."""
    with looking(browser, url) as page:
        read(page, url)
        found = opened(page, "#post_embeddings")
        assert HOSTILE in found.text_content().replace('\\"', '"')
        assert page.locator("img").count() == 0
        assert page.title() == "mlx-gateway: endpoints"


def test_endpoints_are_filtered_and_named_by_the_address(browser: Any, url: str) -> None:
    with looking(browser, url) as page:
        page.get_by_role("link", name="Endpoints").click()
        page.locator(".endpoint").first.wait_for()
        page.get_by_label("Filter").fill("RERANK")
        shown = page.locator(".endpoint:visible summary code").all_text_contents()
        assert shown == ["/v1/rerank", "/v2/rerank"]
        read(page, url, CHAT)
        assert page.locator(".endpoint[open]").evaluate_all("all => all.map((one) => one.id)") == [
            CHAT[1:]
        ]
        page.get_by_role("link", name="Dashboard").click()
        page.locator("#status[data-is=good]").wait_for()


@pytest.mark.parametrize("width", [320, 400, 1280])
def test_nothing_is_wider_than_the_screen(browser: Any, url: str, width: int) -> None:
    with looking(browser, url, viewport={"width": width, "height": 900}) as page:
        read(page, url)
        for endpoint in ("#post_chat_completions", "#post_rerank", "#get_models_one"):
            opened(page, endpoint)
        page.locator("details details:not([open]) > summary").evaluate_all(
            "all => all.forEach((one) => one.click())"
        )
        page.locator("details details details").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_a_gateway_with_keys_asks_for_one(browser: Any, tmp_path: Path) -> None:
    """The page is open and holds nothing; the key of the tab's dashboard opens the rest."""
    with serve(tmp_path, GATEWAY_API_KEYS="open-up") as url:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{url}/docs")
        page.get_by_text("enter it under Keys of the dashboard, and come back").wait_for()
        assert page.locator(".endpoint").count() == 0
        page.evaluate("sessionStorage.setItem('mlx-gateway.api-key', 'open-up')")
        read(page, url)
        text = opened(page, CHAT).text_content()
        assert "An API key is needed" in text
        assert '-H "Authorization: Bearer $KEY"' in text
        assert "open-up" not in text
        context.close()


def test_an_admins_endpoints_say_so(browser: Any, url: str) -> None:
    with looking(browser, url, ADMIN) as page:
        read(page, url)
        assert "The admin key is needed." in opened(page, "#post_admin_reload").text_content()
