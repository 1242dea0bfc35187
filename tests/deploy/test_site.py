"""The site: every page is in its navigation, and its reference is the gateway's own document."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.site import reference
from gateway.api.endpoints import ENDPOINTS
from tests.docs_links import broken_links

ROOT = Path(__file__).parents[2]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
        return
    for entry in nav.values() if isinstance(nav, dict) else nav:
        yield from named(entry)


def test_the_navigation_names_every_page_of_docs_once_and_nothing_that_is_not_there() -> None:
    names = list(named(SITE["nav"]))
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages |= {f"docs/{page}" for page in (reference.ENDPOINTS_PAGE, reference.TYPES_PAGE)}
    assert {name for name in names if name.startswith("docs/")} == pages
    assert all((ROOT / name).exists() for name in names if name not in pages)
    assert len(names) == len({*names})


def test_nothing_is_fetched_from_elsewhere() -> None:
    """Material asks for fonts, and for a repository's stars, unless it is told not to."""
    assert SITE["theme"]["font"] is False
    assert not {"repo_url", "extra_javascript"} & {*SITE}
    assert all((ROOT / name).exists() for name in SITE["extra_css"])


def test_the_reference_has_every_endpoint_and_type_and_its_links_lead_somewhere(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("*.png"))
    reference.write(folder)
    pages = [folder / reference.ENDPOINTS_PAGE, folder / reference.TYPES_PAGE]
    endpoints, types = (page.read_text(encoding="utf-8") for page in pages)
    assert endpoints.count("\n## ") == len(ENDPOINTS)
    told = json.loads((folder / reference.DOCUMENT).read_text(encoding="utf-8"))
    assert types.count("\n## ") == len(told["components"]["schemas"])
    assert broken_links(tmp_path, pages) == []


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({}, "anything"),
        ({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]}, "integer (≥ 0) or null"),
        ({"enum": ["auto", None]}, '`"auto"`, `null`'),
        ({"type": "array", "items": {"$ref": "#/a/Part"}}, "list of [Part](api-types.md#part)"),
        (
            {"type": "object", "additionalProperties": {"type": "number"}, "maxProperties": 1024},
            "object of number (up to 1,024 keys)",
        ),
    ],
)
def test_a_type_is_said_in_words(schema: reference.Schema, words: str) -> None:
    assert reference.in_words(schema) == words
