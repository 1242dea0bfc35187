"""A target, its measured value, and whether it is met. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Verdict:
    """A row of the table. `value` is the median of the `samples`, None if there are none."""

    work: str
    target: str
    value: float | None
    samples: Sequence[float]
    is_met: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio that must be at least `at_least`, or at most `at_most`."""

    work: str
    at_least: float | None = None
    at_most: float | None = None

    def judge(self, samples: Sequence[float | None], *, errors: int = 0, note: str = "") -> Verdict:
        """Compare the median; with wrong answers no target is met.

        A sample of None had nothing to compare with: one of them, and nothing was measured.
        """
        said = [f"{errors} errors"] if errors else []
        said += [note] if note else []
        measured = [sample for sample in samples if sample is not None]
        if len(measured) < len(samples) or not measured:
            why = "; ".join(["not measured: what it is compared with did nothing", *said])
            return Verdict(self.work, self._written(), None, (), is_met=False, note=why)
        value = median(measured)
        is_met = (
            not errors
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
        )
        return Verdict(self.work, self._written(), value, tuple(measured), is_met, "; ".join(said))

    def _written(self) -> str:
        low = [f"≥ {self.at_least:g}"] if self.at_least is not None else []
        high = [f"≤ {self.at_most:g}"] if self.at_most is not None else []
        return ", ".join(low + high)


def ratio(own: float | None, reference: float | None) -> float | None:
    """Compare with a reference; None where that did nothing at all, or own is not known."""
    return own / reference if own is not None and reference else None


def not_measured(work: str, reason: str) -> Verdict:
    """Say why there is nothing to compare."""
    lines = reason.strip().splitlines() or ["no reason given"]
    return Verdict(work, "", None, (), is_met=False, note=f"not measured: {lines[-1]}")


def markdown(verdicts: Sequence[Verdict]) -> str:
    """Write the table: the median, the range of the rounds, and the remarks."""
    lines = ["| work | target | measured | met |", "| --- | --- | --- | --- |"]
    for each in verdicts:
        met = "no" if not each.is_met else "yes" if each.target else "–"  # nothing to be met
        lines.append(f"| {each.work} | {each.target} | {_measured(each)} | {met} |")
    return "\n".join(lines)


def _measured(verdict: Verdict) -> str:
    if verdict.value is None:
        return verdict.note
    told = f"{verdict.value:.3g}"
    if len(verdict.samples) > 1:
        told += f" ({min(verdict.samples):.3g}–{max(verdict.samples):.3g})"
    return f"{told}; {verdict.note}" if verdict.note else told
