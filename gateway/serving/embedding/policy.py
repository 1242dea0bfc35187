"""Pure functions that decide which inputs share a pass, and how long a pass waits for more."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.serving.admission import NO_BOUND


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The seconds that a pass waits for more inputs, at low, medium and high load."""

    low_s: float
    medium_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingLimits:
    """The limits of a pass, of its wait for more inputs, and of the queue."""

    max_batch_size: int
    max_batch_tokens: int
    batch_window_s: float
    min_batch_size: int = 1
    batch_deadline_s: float = 0.1  # most seconds that an input waits for other inputs
    # Windows that depend on the load; if given, they replace `batch_window_s`.
    windows: Windows | None = None
    queue_max_tokens: int = NO_BOUND
    cache_size: int = 0  # most vectors in the cache
    # The most seconds that a pass should take: its tokens are bounded accordingly.
    pass_limit_s: float = 0.25


def take_batch(lengths: Sequence[Sequence[int]], max_rows: int, max_tokens: int) -> list[int]:
    """Return how many of each request's next inputs share the next padded batch.

    `lengths` has a list for each request, oldest first: the lengths of the request's inputs in
    tokens, in the order in which they are to be taken. Requests take turns, one input each, so that
    a huge request leaves room for small ones. The tokens of a padded batch are the length of its
    longest row times the number of rows. The first input of the oldest request is always taken,
    even if it exceeds `max_tokens`, since it would never be served otherwise.
    """
    counts = [0] * len(lengths)
    rows = longest = 0
    turns = deque(range(len(lengths)))
    while turns and rows < max_rows:
        request = turns.popleft()
        length = lengths[request][counts[request]]
        if rows and max(longest, length) * (rows + 1) > max_tokens:
            continue  # the request's further inputs are at least as long, so none fits
        longest = max(longest, length)
        rows += 1
        counts[request] += 1
        if counts[request] < len(lengths[request]):
            turns.append(request)
    return counts


def window(load: int, limits: EmbeddingLimits) -> float:
    """Return the seconds of the window when `load` requests are waiting or on their way.

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
    """Return how many more seconds the `rows` waiting inputs, of which the oldest has waited for
    `age_s`, should wait for other inputs.

    `newest_age_s` is the age of the newest request that is on its way to the queue, or None. There
    are four cases:
    1. The batch is full: 0.
    2. The batch is below the minimum size: the rest of the window or of the deadline, whichever is
       shorter.
    3. No request is on its way: 0, the fast path.
    4. A request is on its way: as in case 2, but at most until the request has been on its way for
       a window, so that no pass waits for a slow client.
    """
    if rows >= limits.max_batch_size or limits.max_batch_size == 1:
        return 0.0
    left_s = min(window_s, limits.batch_deadline_s) - age_s
    if rows >= limits.min_batch_size:
        if newest_age_s is None:
            return 0.0
        left_s = min(left_s, window_s - newest_age_s)
    return max(0.0, left_s)
