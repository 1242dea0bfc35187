"""Who joins a model's running rows, and in what order: decisions, no doing."""

from dataclasses import dataclass

from gateway.jobs import Tier
from gateway.serving.admission import NO_BOUND


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLimits:
    """How many rows run together, how many of them bound to a grammar, how many tokens and how
    long one pass may read prompts, how much sooner a priority request counts as come, and how long
    one waits for memory that only other models hold.
    """

    max_batch_size: int
    structured_rows: int = 1
    prefill_chunk_tokens: int
    pass_limit_s: float = 0.25
    queue_limit: int = NO_BOUND
    queue_max_tokens: int = NO_BOUND
    tier_head_start_s: float = 5.0
    memory_wait_s: float = 20.0


def rank(arrived: float, tier: Tier, head_start_s: float) -> float:
    """Give a request's place in the queue: lower goes first.

    A priority request counts as come so many seconds sooner, a flex one as come later: both
    overtake or give way, and neither starves or is starved for longer than that.
    """
    return arrived + {Tier.PRIORITY: -head_start_s, Tier.FLEX: head_start_s}.get(tier, 0.0)


def prefill_goes_first(reading: int, decoding: int, waited_s: float, bound_s: float) -> bool:
    """Return True if the rows that decode wait for those whose prompts are being read.

    A decode step of a few rows costs nearly as much as one of all of them, so a burst is read
    before it is answered: while more rows are being read than run, for `bound_s` between two steps.
    """
    return reading > decoding and waited_s < bound_s
