"""What passes have raised: which sequence was to blame, or batching, or the device."""

from collections.abc import Sequence
from typing import Final

from gateway.engine.device_faults import classify
from gateway.engine.generation.sequence import Sequence as Row
from gateway.errors import Fault, PassFault
from gateway.jobs import Delta

FAULTS: Final = 3


class Faults:
    """Errors of passes over several sequences, and which of them caused each.

    The sequences of such a pass are read again, alone. If one of them fails then, it was to blame;
    if none does, batching was. After some of those the model is not batched.
    """

    def __init__(self) -> None:
        self._suspects: list[set[int]] = []
        self._untold: list[PassFault] = []
        self._count = 0

    @property
    def is_batching_to_blame(self) -> bool:
        """Return True once enough passes have failed whose sequences all went well alone."""
        return self._count >= FAULTS

    def blame(self, rows: Sequence[Row], error: Exception) -> Delta | None:
        """Record the error of a pass. Return the end of a sequence that was alone already; all
        others are to be read again.
        """
        fault = classify(error)
        self.record([row.id for row in rows], fault, error)
        if len(rows) == 1 and rows[0].is_suspect:
            self.dismiss(rows[0].id)
            message = f"{type(error).__name__}: {error}"
            return rows[0].error_delta(message, is_out_of_memory=fault is Fault.PRESSURE)
        for row in rows:
            # Of several that memory was too short for, none is to blame: fewer are read together.
            row.suspect(is_read_alone=len(rows) == 1 or fault is not Fault.PRESSURE)
        return None

    def record(self, rows: Sequence[int], fault: Fault, error: Exception) -> None:
        """Record the error that a pass over several sequences has raised. That memory ended says
        nothing of batching.
        """
        self._record(fault, f"{len(rows)} rows", error)
        if len(rows) > 1 and fault is not Fault.PRESSURE:
            self._suspects.append(set(rows))

    def record_draft(self, error: Exception) -> None:
        """Record the error of a draft model, not used any more. No sequence is to blame."""
        self._record(classify(error), "draft model, off now", error)

    def _record(self, fault: Fault, where: str, error: Exception) -> None:
        message = f"{where}: {type(error).__name__}: {str(error)[:500]}"
        self._untold.append(PassFault(fault, message))

    def clear_of_blame(self, row: int) -> None:
        """Record that a sequence went well alone."""
        for suspects in self._suspects:
            suspects.discard(row)
        self._count += sum(1 for suspects in self._suspects if not suspects)
        self._suspects = [suspects for suspects in self._suspects if suspects]

    def dismiss(self, row: int) -> None:
        """Record that a sequence failed alone, or left: its pass proves nothing about batching."""
        self._suspects = [suspects for suspects in self._suspects if row not in suspects]

    def take(self) -> list[PassFault]:
        """Return the errors recorded since the last call."""
        untold, self._untold = self._untold, []
        return untold
