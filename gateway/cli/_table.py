"""A table on a terminal, tab-separated lines anywhere else."""

import sys
from collections.abc import Iterable, Sequence


def show(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; off a terminal, one line a row without a heading."""
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join(row))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(Text(cell, overflow="fold") for cell in row))
    Console().print(table)
