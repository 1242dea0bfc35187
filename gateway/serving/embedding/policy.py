"""Decides which inputs share a pass, and how long a pass waits for more inputs."""

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
    """The limits of a pass, its wait for more inputs, and the queue."""

    max_batch_size: int
    max_batch_tokens: int
    batch_window_s: float
    min_batch_size: int = 1
    batch_deadline_s: float = 0.1  # most seconds that an input waits for other inputs
    windows: Windows | None = None  # used instead of `batch_window_s`
    queue_max_tokens: int = NO_BOUND
    cache_size: int = 0
    pass_limit_s: float = 0.25  # most seconds that a pass should take


def take_batch(lengths: Sequence[Sequence[int]], max_rows: int, max_tokens: int) -> list[int]:
    """Return how many of each request's next inputs share the next padded batch.

    `lengths` has the inputs' lengths in tokens for each request, oldest request first, shortest
    input first. Requests take turns, one input each. The first input of the oldest request is
    always taken, since otherwise it might never be served.
    """
    counts = [0] * len(lengths)
    rows = longest = 0
    turns = deque(range(len(lengths)))
    while turns and rows < max_rows:
        request = turns.popleft()
        length = lengths[request][counts[request]]
        if rows and max(longest, length) * (rows + 1) > max_tokens:
            continue  # the request's further inputs are at least as long
        longest = max(longest, length)
        rows += 1
        counts[request] += 1
        if counts[request] < len(lengths[request]):
            turns.append(request)
    return counts


def window(load: int, limits: EmbeddingLimits) -> float:
    """Return the seconds to wait for more inputs while `load` requests are waiting or arriving."""
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
    """Return how many more seconds the `rows` waiting inputs should wait for other inputs.

    The oldest input has waited for `age_s`, and the newest arriving request is `newest_age_s` old.
    A batch of the minimum size waits at most a window for that request, since its client may be
    slow.
    """
    if rows >= limits.max_batch_size or limits.max_batch_size == 1:
        return 0.0
    left_s = min(window_s, limits.batch_deadline_s) - age_s
    if rows >= limits.min_batch_size:
        if newest_age_s is None:
            return 0.0
        left_s = min(left_s, window_s - newest_age_s)
    return max(0.0, left_s)
