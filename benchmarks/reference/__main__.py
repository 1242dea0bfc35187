"""The command: rows that have no result yet, base rows first; then the table."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks import architectures
from benchmarks.reference import forms, keys, table
from benchmarks.reference.rows import BASE, Results, Row, part_of
from benchmarks.reference.trial import changes_of, fields_of, try_out
from gateway.engine.embedding.cross_encoder import HEADS
from gateway.engine.embedding.engine import ENCODERS

ALSO: Final = ("arcee", "lfm2_vl", "ministral")  # known classes by another name
# Encoders, decoders that embed and rerankers, each with its task.
TASKS: Final = (
    *(f"{kind}:vectors" for kind in ENCODERS if kind != "new"),  # transformers has no class of it
    *(f"{kind}:vectors" for kind in ("eurobert", "gemma3_text", "llama")),
    *(f"{kind}:vectors" for kind in ("mistral", "qwen2", "qwen3")),
    *(f"{kind}:scores" for kind in HEADS),
)
MODULE: Final = "benchmarks.reference"
RESULTS: Final = architectures.REPOSITORY / "build" / "reference.jsonl"


def names() -> list[str]:
    """List the architectures that mlx-lm and transformers share, and the text parts of such."""
    import mlx_lm.models
    from mlx_lm.utils import MODEL_REMAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    modules = {path.stem for path in Path(mlx_lm.models.__path__[0]).glob("*.py")}
    ours = {*modules, *MODEL_REMAPPING, *ALSO}
    made = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    return [*sorted(name for name in made if {name, name.removesuffix("_text")} & ours), *TASKS]


def main(arguments: Sequence[str] | None = None) -> int:
    """Try rows; return 1 if any is wrong."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--part", default="1/1", metavar="N/M", help="every Mth architecture")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--base", action="store_true", help="change no key")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.inside:
        architectures.inside(try_out)
        return 0
    if importlib.util.find_spec("torch") is None:
        sys.exit("make reference has an environment of its own, with torch.")
    every = names()
    wanted = part_of(given.names or every, given.part)
    results = Results(given.results)
    if given.fresh:
        results.forget(wanted)
    rows = [Row(name, form) for name in wanted for form in forms.FORMS]
    run(rows, results, given.jobs)
    if not given.base:
        rows += changed(rows, results)
        run(rows, results, given.jobs)
    found = table.summary(
        [(row, results[row]) for row in rows],
        {name: keys.uncovered(fields_of(name)) for name in wanted},
    )
    if set(wanted) == set(every) and not given.base:
        table.write(found)
    else:
        print(table.table(found))
    return int(any(results.is_wrong(row) for row in rows))


def run(rows: Sequence[Row], results: Results, jobs: int) -> None:
    """Try those rows that have no result."""
    due = {row.line(): row for row in rows if row not in results}
    for line, found in architectures.each_tried(list(due), jobs, MODULE):
        row = due[line]
        said = {"outcome": "throws", "reason": found["error"]} if "error" in found else found
        results.add(row, said)
        print(row.architecture, row.form, row.key, json.dumps(said), flush=True)


def changed(bases: Sequence[Row], results: Results) -> list[Row]:
    """Return the rows that change a key of those base rows that are equal.

    Forms of a key follow each other, so that transformers' model is made once for both.
    """
    equal: dict[str, list[str]] = {}
    for row in bases:
        if results[row]["outcome"] == "equal":
            equal.setdefault(row.architecture, []).append(row.form)
    return [
        Row(name, form, key)
        for name, its_forms in equal.items()
        for key in changes_of(name)
        if key != BASE
        for form in its_forms
    ]


if __name__ == "__main__":
    sys.exit(main())
