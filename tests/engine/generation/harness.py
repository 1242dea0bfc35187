"""What tests do to an engine without a plan: its own verbs, one by one."""

from itertools import count

from gateway.engine.generation.engine import GenerationEngine
from gateway.jobs import SequenceParams

_numbers = count(1)


def join(engine: GenerationEngine, params: SequenceParams) -> int:
    """Queue a sequence for prefill, by a number of its own."""
    number = next(_numbers)
    engine.join(number, params)
    return number


def prefilling(engine: GenerationEngine) -> set[int]:
    return {row.id for row in engine._prefill.rows}
