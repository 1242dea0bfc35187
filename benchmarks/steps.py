"""A chat model's engine, driven plan by plan, as its batcher drives it."""

from collections.abc import Sequence
from typing import Any

from gateway.engine.generation.engine import GenerationEngine
from gateway.errors import PassFault
from gateway.jobs.chat import Delta
from gateway.jobs.steps import Pass, SequenceParams, StepPlan, StepResult


class Steps:
    """The steps of an engine that nothing else drives meanwhile."""

    def __init__(self, engine: GenerationEngine) -> None:
        self.engine = engine
        self.result = StepResult()  # the result of the last step
        self.faults: list[PassFault] = []  # the faults of all passes

    def change(self, **changes: Any) -> Sequence[Delta]:
        """Make a step without a pass; `changes` are fields of StepPlan."""
        return self._make(StepPlan(**changes))

    def prefill(self, token_budget: int = 512) -> Sequence[Delta]:
        """Make a step that reads a chunk."""
        return self._make(StepPlan(kind="prefill", token_budget=token_budget))

    def decode(self) -> Sequence[Delta]:
        """Make a step that takes a token of each sequence that decodes."""
        return self._make(StepPlan(kind="decode"))

    def join(self, sequence_id: int, params: SequenceParams) -> None:
        """Let a sequence join. Raises the error that keeps it from joining."""
        for delta in self.change(joining=[(sequence_id, params)]):
            raise RuntimeError(delta.error)

    def leave(self, *sequence_ids: int) -> None:
        """Let sequences leave."""
        self.change(leaving=sequence_ids)

    @property
    def is_reading(self) -> bool:
        """Return True while a sequence has prompt left to read."""
        return bool(self.result.reading)

    @property
    def is_decoding(self) -> bool:
        """Return True while a sequence decodes."""
        return self.result.decoding > 0

    @property
    def is_busy(self) -> bool:
        """Return True while a sequence reads or decodes."""
        return self.is_reading or self.is_decoding

    @property
    def count(self) -> int:
        """Count the sequences that read or decode."""
        return len(self.result.reading) + self.result.decoding

    @property
    def size(self) -> Pass:
        """Return the size of the last step's pass."""
        return self.result.size

    def _make(self, plan: StepPlan) -> Sequence[Delta]:
        self.result = self.engine.step(plan)
        self.faults += self.result.faults
        return self.result.deltas
