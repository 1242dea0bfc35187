"""The generated tables of the docs: `make docs` writes them, test_readme compares them."""

import re
from collections.abc import Callable
from pathlib import Path

from gateway.api.endpoints import ENDPOINTS
from gateway.api.openapi import endpoints_table, fields_table
from gateway.settings import environment_table

DOCS = Path(__file__).parents[1] / "docs"
TABLES: dict[str, tuple[Path, Callable[[], str]]] = {
    "settings": (DOCS / "settings.md", environment_table),
    "endpoints": (DOCS / "api.md", lambda: endpoints_table(ENDPOINTS)),
    "fields": (DOCS / "api.md", lambda: fields_table(ENDPOINTS)),
}


def generated(name: str) -> tuple[Path, str, str]:
    """Return the page of a table, its text as it is, and its text as it should be."""
    page, table = TABLES[name]
    text = page.read_text(encoding="utf-8")
    before, mark, rest = re.split(rf"(<!-- {name}:[^>]*-->\n)", text)
    _, after = rest.split(f"<!-- /{name} -->")
    return page, text, f"{before}{mark}{table().strip()}\n<!-- /{name} -->{after}"


if __name__ == "__main__":
    for name in TABLES:
        page, _, new = generated(name)
        page.write_text(new, encoding="utf-8")
