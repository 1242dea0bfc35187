"""python -m benchmarks.device.table: the table of docs/devices/README.md, from its pages."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

DOCS: Final = Path(__file__).parents[2] / "docs" / "devices"
START, END = "<!-- devices: written by `make device` -->", "<!-- /devices -->"
_BLOCK: Final = re.compile(r"^```json\n(.*?)\n```$", re.MULTILINE | re.DOTALL)


def read_blocks(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return the last block of each page, by the page's name; pages without one are left out."""
    blocks: dict[str, Mapping[str, Any]] = {}
    for page in sorted(folder.glob("*.md")):
        if page.name == "README.md":
            continue
        texts = _BLOCK.findall(page.read_text(encoding="utf-8"))
        if texts:
            blocks[page.name] = json.loads(texts[-1])
    return blocks


def make_table(blocks: Mapping[str, Mapping[str, Any]]) -> str:
    """Write a row for each page: parity, and tokens a second of a row and of the most together."""
    lines = [
        "| Device | Memory | mlx, mlx-lm, gateway | Parity | Shapes | Tokens/s at 1 stream, engine "
        "÷ BatchGenerator | At 8 streams |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_row(page, block) for page, block in blocks.items()]
    return "\n".join(lines)


def _row(page: str, block: Mapping[str, Any]) -> str:
    verdicts, failed = block["verdicts"], block["failed"]
    parity = f"{failed} of {verdicts} fail" if failed else f"{verdicts} ok"
    size = "small" if block["small"] else "whole"
    cells = (
        f"[{block['device']}, {block['date']}]({page})",
        f"{block['memory_gib']:.0f} GiB ({block['kind']})",
        f"{block['mlx']}, {block['mlx_lm']}, {block['commit']}",
        parity,
        size,
        _ratios(block["figures"], "1 stream"),
        _ratios(block["figures"], "8 streams"),
    )
    return "| " + " | ".join(cells) + " |"


def _ratios(figures: Mapping[str, float], at: str) -> str:
    """Say both parties' tokens a second on Qwen3's shapes in 4 bits, and the ratio; of a report of
    `doctor`, which has no other party, its own.
    """
    texts = []
    for shape, dtype, engine, reference in _pairs(figures, at):
        if reference is None:
            texts.append(f"{shape}, {dtype}: {engine:.0f}")
        elif dtype.startswith("4bit") and shape.startswith("qwen3"):
            texts.append(
                f"{shape}, {dtype}: {engine:.0f} ÷ {reference:.0f} = {engine / reference:.2f}"
            )
    return "; ".join(texts) or "–"


def _pairs(figures: Mapping[str, float], at: str) -> Iterable[tuple[str, str, float, float | None]]:
    """Yield the shape, the dtype and both parties' figures of each model."""
    start, end = "tokens, ", f", {at}, gateway's engine"
    for name, value in figures.items():
        if not (name.startswith(start) and name.endswith(end)):
            continue
        model = name.removeprefix(start).removesuffix(end)
        shape, _, dtype = model.rpartition(", ")
        yield shape, dtype, value, figures.get(f"{start}{model}, {at}, BatchGenerator")


def update(folder: Path = DOCS) -> None:
    """Write the table between its marks in the folder's README."""
    file = folder / "README.md"
    before, _, rest = file.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    table = make_table(read_blocks(folder))
    file.write_text(f"{before}{START}\n\n{table}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    update()
