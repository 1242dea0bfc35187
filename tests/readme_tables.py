"""The README's generated tables: `make docs` writes them, test_readme compares them."""

import re
from collections.abc import Callable
from pathlib import Path

from gateway.settings import environment_table
from gateway.wire.table import fields_table

README = Path(__file__).parents[1] / "README.md"
TABLES: dict[str, Callable[[], str]] = {"settings": environment_table, "fields": fields_table}


def written(readme: str) -> str:
    """Give the README with its tables as they should be."""
    for name, table in TABLES.items():
        between = re.compile(rf"(<!-- {name}:[^>]*-->\n).*?(<!-- /{name} -->)", re.DOTALL)
        new = table().strip()
        readme = between.sub(rf"\g<1>{new.replace(chr(92), chr(92) * 2)}\n\g<2>", readme)
    return readme


if __name__ == "__main__":
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
