"""The rows to try, their results in a file, and how a result is judged."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

EQUAL: Final = 1e-3  # rms of a difference ÷ standard deviation of the reference
BASE: Final = ""  # the key of a row in which nothing is changed
# A row's outcomes. The last two say that it is none: the key changes nothing, or transformers makes
# no such model.
OUTCOMES: Final = ("equal", "refused", "limited", "WRONG", "throws", "unseen", "not made")


@dataclass(frozen=True)
class Row:
    """An architecture, a form of its files, and the key of its config that is changed."""

    architecture: str
    form: str
    key: str = BASE

    def line(self) -> str:
        """Return it as a line of JSON."""
        return json.dumps([self.architecture, self.form, self.key])


@dataclass(frozen=True)
class Gap:
    """The distance of logits from a reference's: at the worst position, by rms ÷ deviation."""

    worst: float
    first: int | None  # position that is not equal
    agreeing: float  # share of positions with the same best token

    @classmethod
    def between(cls, reference: NDArray[np.float32], found: NDArray[np.float32]) -> "Gap":
        """Compare logits, (positions, vocabulary)."""
        width = min(reference.shape[1], found.shape[1])  # a vocabulary may be padded
        reference, found = reference[:, :width], found[:, :width]
        spread = reference.std(1) + 1e-9
        gaps = np.sqrt(((reference - found) ** 2).mean(1)) / spread
        [wrong] = np.nonzero(~(gaps <= EQUAL))  # NaN is wrong, too
        same = float((reference.argmax(1) == found.argmax(1)).mean())
        worst = float(gaps.max()) if np.isfinite(gaps).all() else float("inf")
        return cls(worst, int(wrong[0]) if len(wrong) else None, same)


def judged(whole: Gap, steps: Gap) -> dict[str, Any]:
    """Return the outcome of two comparisons: all positions at once, and steps after a prefill."""
    is_equal = whole.first is None and steps.first is None
    return {
        "outcome": "equal" if is_equal else "WRONG",
        "gap": round(whole.worst, 7),
        "decode": round(steps.worst, 7),
        **({} if is_equal else {"first": whole.first, "agreeing": round(whole.agreeing, 3)}),
    }


class Results:
    """The rows' outcomes, in a file of JSON lines that grows as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[Row, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._take(line)

    def _take(self, line: str) -> None:
        try:
            said = json.loads(line)
        except ValueError:  # a line cut short: its row is tried again
            return
        row = Row(said.pop("architecture"), said.pop("form"), said.pop("key"))
        self._found[row] = said

    def __contains__(self, row: Row) -> bool:
        return row in self._found

    def is_wrong(self, row: Row) -> bool:
        """Return True if answers are other than the reference's, or none."""
        return self._found[row]["outcome"] in ("WRONG", "throws")

    def __getitem__(self, row: Row) -> dict[str, Any]:
        return self._found[row]

    def add(self, row: Row, said: Mapping[str, Any]) -> None:
        """Keep a row's outcome, and write it down at once."""
        self._found[row] = dict(said)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            print(json.dumps({**asdict(row), **said}), file=file)

    def forget(self, architectures: Iterable[str]) -> None:
        """Drop the results of some architectures."""
        gone = set(architectures)
        self._found = {row: v for row, v in self._found.items() if row.architecture not in gone}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({**asdict(row), **said}) for row, said in self._found.items()]
        self._path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def part_of(names: Sequence[str], part: str) -> list[str]:
    """Return every Mth of the names, from the Nth, for a part "N/M"."""
    number, _, count = part.partition("/")
    return list(names[int(number) - 1 :: int(count)])
