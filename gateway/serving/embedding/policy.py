"""Which inputs share a pass and how long it waits for more: functions of their arguments."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.serving.admission import NO_BOUND


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """How long a pass waits for more inputs, in seconds, by load."""

    low_s: float
    medium_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingLimits:
    """The bounds of a pass, of the wait for more inputs, and of the queue."""

    max_batch_size: int
    max_batch_tokens: int
    batch_window_s: float
    min_batch_size: int = 1
    batch_deadline_s: float = 0.1  # no input waits longer for others
    # The windows by load, used instead of `batch_window_s`.
    windows: Windows | None = None
    queue_max_tokens: int = NO_BOUND
    cache_size: int = 0  # vectors that are kept
    # The longest that a pass should take: measured speed bounds its tokens.
    pass_limit_s: float = 0.25


def take_batch(lengths: Sequence[Sequence[int]], max_rows: int, max_tokens: int) -> list[int]:
    """Decide how many of each request's next inputs share the next padded batch.

    `lengths` has, for each request, oldest first, the tokens of its inputs in the order they
    are to be taken. One input of each request is taken in turn, so that a huge request leaves
    room for small ones. A padded batch costs its longest row times its rows. The oldest request's
    first input is always taken, so that an over-long one is served alone rather than never.
    """
    counts = [0] * len(lengths)
    rows = longest = 0
    turns = deque(range(len(lengths)))
    while turns and rows < max_rows:
        request = turns.popleft()
        length = lengths[request][counts[request]]
        if rows and max(longest, length) * (rows + 1) > max_tokens:
            continue  # its next inputs are longer still
        longest = max(longest, length)
        rows += 1
        counts[request] += 1
        if counts[request] < len(lengths[request]):
            turns.append(request)
    return counts


def window(load: int, limits: EmbeddingLimits) -> float:
    """Return the window in seconds for `load` requests, waiting or on their way.

    The load is low below a quarter of a full batch, and high from a full batch on.
    """
    if limits.windows is None:
        return limits.batch_window_s
    if 4 * load < limits.max_batch_size:
        return limits.windows.low_s
    if load < limits.max_batch_size:
        return limits.windows.medium_s
    return limits.windows.high_s


def patience(
    rows: int,
    age_s: float,
    window_s: float,
    limits: EmbeddingLimits,
    *,
    newest_age_s: float | None,
) -> float:
    """Return how many more seconds `rows` waiting inputs, the oldest `age_s` old, wait for others.

    `newest_age_s` is the age of the newest request still on its way, None if none is. There are
    four cases:
    1. The batch is full: 0.
    2. It is below the minimum size: the rest of the window, and of the deadline.
    3. No request is on its way: 0, the fast path.
    4. One is: the same as 2, but at most until it has been on its way for a window, so that no
       pass waits for a slow client.
    """
    if rows >= limits.max_batch_size or limits.max_batch_size == 1:
        return 0.0
    left_s = min(window_s, limits.batch_deadline_s) - age_s
    if rows >= limits.min_batch_size:
        if newest_age_s is None:
            return 0.0
        left_s = min(left_s, window_s - newest_age_s)
    return max(0.0, left_s)
