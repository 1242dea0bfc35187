"""The findings of a part: figures and comparisons, and the file that keeps them between runs."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from benchmarks.device.parity import Comparison

Status: TypeAlias = Literal["done", "skipped", "failed"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured number: of whom (`who`), on which model, and in which case (`at`)."""

    name: str
    value: float
    unit: str
    who: str
    shape: str
    dtype: str
    at: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a part: `error` says why it failed or was skipped. `subject` is the model that
    its comparisons are of, and their dtype.
    """

    status: Status
    seconds: float = 0.0
    error: str = ""
    subject: str = ""
    comparisons: Sequence[Comparison] = ()
    figures: Sequence[Figure] = ()

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Result":
        comparisons = [Comparison(**_restore(saved)) for saved in fields["comparisons"]]
        figures = [Figure(**saved) for saved in fields["figures"]]
        return cls(**{**fields, "comparisons": comparisons, "figures": figures})

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        for comparison in fields["comparisons"]:
            if not math.isfinite(comparison["worst"]):  # JSON has no word for it
                comparison |= {"worst": None, "mean": None}
        return fields


def _restore(fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["worst"] is None:
        return {**fields, "worst": math.inf, "mean": math.inf}
    return dict(fields)


@dataclass(slots=True)
class State:
    """The results so far of one machine, commit and set of versions, which `key` names.

    `dropped` counts the results of another key that the file had.
    """

    file: Path
    key: Mapping[str, Any]
    results: dict[str, Result] = field(default_factory=dict)
    dropped: int = 0

    @classmethod
    def load(cls, file: Path, key: Mapping[str, Any]) -> "State":
        """Read the file, if it is there and of this key."""
        state = cls(file, key)
        try:
            saved = json.loads(file.read_text(encoding="utf-8"))
            results = {name: Result.from_json(part) for name, part in saved["parts"].items()}
        except (OSError, ValueError, KeyError, TypeError):
            return state
        if saved["key"] == dict(key):
            state.results = results
        else:
            state.dropped = len(results)
        return state

    def add(self, name: str, result: Result) -> None:
        """Add a result, and write all of them in one step."""
        self.results[name] = result
        parts = {part: saved.to_json() for part, saved in self.results.items()}
        text = json.dumps({"key": dict(self.key), "parts": parts}, indent=1)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.file.with_suffix(".new")
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, self.file)
