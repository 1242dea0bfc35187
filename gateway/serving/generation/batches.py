"""Who joins a model's running rows, and in what order: decisions, no doing."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.jobs import Tier
from gateway.serving.admission import NO_BOUND


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLimits:
    """How many rows run together, how many of them bound to a grammar, how long one turn may
    read prompts, how much sooner a priority request counts as come, and how long one waits for
    memory that only other models hold.
    """

    max_batch_size: int
    structured_rows: int = 1
    prefill_chunk_tokens: int
    queue_max_tokens: int = NO_BOUND
    tier_head_start_s: float = 5.0
    memory_wait_s: float = 20.0


def rank(arrived: float, tier: Tier, head_start_s: float) -> float:
    """Give a request's place in the queue: lower goes first.

    A priority request counts as come so many seconds sooner, a flex one as come later: both
    overtake or give way, and neither starves or is starved for longer than that.
    """
    return arrived + {Tier.PRIORITY: -head_start_s, Tier.FLEX: head_start_s}.get(tier, 0.0)


def take_rows(waiting: Sequence[bool], *, room: int, bound_room: int) -> list[int]:
    """Choose which waiting rows join, by place: the oldest first, while there is room.

    `waiting` tells which rows are bound to a grammar. Those have room of their own; free rows
    pass them, and they keep their order among themselves.
    """
    chosen: list[int] = []
    for place, is_bound in enumerate(waiting):
        if len(chosen) >= room:
            break
        if not is_bound or bound_room > 0:
            chosen.append(place)
            bound_room -= is_bound
    return chosen
