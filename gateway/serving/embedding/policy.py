"""Which inputs share a pass, and how long others are waited for: decisions, no doing."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gateway import metrics
from gateway.errors import BadRequest, ContextLengthExceeded
from gateway.jobs import EmbedJob, TokenIds
from gateway.serving.admission import NO_BOUND
from gateway.serving.ports import EmbeddingEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Collection windows by load, in seconds."""

    low_s: float
    medium_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingLimits:
    """How much goes into one pass, how long a burst is waited for, and how much may wait.

    With `windows` the window follows the load and `batch_window_s` is not used. No input waits
    for others longer than `batch_deadline_s`. `cache_size` counts the vectors kept; 0 keeps none.
    No pass has more tokens than, as measured, take `pass_limit_s`.
    """

    max_batch_size: int
    max_batch_tokens: int
    batch_window_s: float
    min_batch_size: int = 1
    batch_deadline_s: float = 0.1
    windows: Windows | None = None
    queue_max_tokens: int = NO_BOUND
    cache_size: int = 0
    pass_limit_s: float = 0.25


def take_batch(lengths: Sequence[Sequence[int]], max_rows: int, max_tokens: int) -> list[int]:
    """Decide how many of each request's next inputs share the next padded batch.

    `lengths` has, for each request, oldest first, the tokens of its inputs in the order they
    are to be taken. Requests give one input each in turn, so that a huge one leaves room for
    small ones. A padded batch costs its longest row times its rows. The oldest request's first
    input is always taken, so that an over-long one is served alone rather than never.
    """
    taken = [0] * len(lengths)
    rows = longest = 0
    giving = deque(range(len(lengths)))
    while giving and rows < max_rows:
        request = giving.popleft()
        length = lengths[request][taken[request]]
        if rows and max(longest, length) * (rows + 1) > max_tokens:
            continue  # it gives no more this time
        longest = max(longest, length)
        rows += 1
        taken[request] += 1
        if taken[request] < len(lengths[request]):
            giving.append(request)
    return taken


def window(load: int, limits: EmbeddingLimits) -> float:
    """Choose the collection window, in seconds, for so many requests waiting or on their way.

    Below a quarter of a full batch the load is low, from a full batch on it is high.
    """
    if limits.windows is None:
        return limits.batch_window_s
    if 4 * load < limits.max_batch_size:
        return limits.windows.low_s
    return limits.windows.medium_s if load < limits.max_batch_size else limits.windows.high_s


def patience(
    rows: int,
    age_s: float,
    window_s: float,
    limits: EmbeddingLimits,
    *,
    newest_age_s: float | None,
) -> float:
    """Decide how many more seconds `rows` waiting inputs, the oldest so old, wait for others.

    `newest_age_s` tells how long ago the newest request came that is still on its way, None if
    none is. 0 when the batch is full or nobody is on the way: that is the fast path. One that
    has been on its way for a window, as a slow client's has, is not waited for. A batch below the
    minimum size waits even so, but never beyond the window.
    """
    if rows >= limits.max_batch_size or limits.max_batch_size == 1:
        return 0.0
    left_s = min(window_s, limits.batch_deadline_s) - age_s
    if rows >= limits.min_batch_size:
        if newest_age_s is None:
            return 0.0
        left_s = min(left_s, window_s - newest_age_s)
    return max(0.0, left_s)


Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Known:
    """A text's vector, (dimensions,), the tokens read for it, and whether it was cut."""

    vector: Vector
    tokens: int
    was_cut: bool


class EmbeddingCache:
    """At most `size` vectors by text, its prompt included; none at all for a size of 0."""

    def __init__(self, model: str, size: int) -> None:
        self._size = size
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._hit = metrics.of(metrics.EMBEDDING_CACHE, model, "hit")
        self._missed = metrics.of(metrics.EMBEDDING_CACHE, model, "miss")

    def resize(self, size: int) -> None:
        """Keep at most `size` from now on."""
        self._size = size
        while len(self._known) > size:
            self._known.popitem(last=False)

    def get(self, text: str, *, truncate: bool) -> Known | None:
        """Return what is known of a text. One that was cut counts only if `truncate`."""
        if not self._size:
            return None
        known = self._known.get(text)
        if known is None or (known.was_cut and not truncate):
            self._missed.inc()
            return None
        self._known.move_to_end(text)
        self._hit.inc()
        return known

    def put(self, text: str, known: Known) -> None:
        """Keep a text's vector, dropping the least recently used one if full."""
        if not self._size:
            return
        # A copy of its own: the vector is a view of its whole request's.
        self._known[text] = replace(known, vector=known.vector.copy())
        self._known.move_to_end(text)
        if len(self._known) > self._size:
            self._known.popitem(last=False)


def add_prompts(engine: EmbeddingEngine, model: str, job: EmbedJob) -> list[str]:
    """Put the prompt that the job names, or the model's own, before each text.

    Raises BadRequest for one that the model does not have.
    """
    name = job.prompt_name or engine.default_prompt_name
    if not job.texts or name is None:
        return list(job.texts)
    if name not in engine.prompts:
        known = ", ".join(sorted(engine.prompts)) or "none"
        raise BadRequest(
            f"The model `{model}` has no prompt `{name}`; it has: {known}.", part="prompt_name"
        )
    return [engine.prompts[name] + text for text in job.texts]


def known_ids(engine: EmbeddingEngine, model: str, rows: Sequence[TokenIds]) -> list[TokenIds]:
    """Raise BadRequest for ids outside the vocabulary: MLX would read past its table."""
    size = engine.vocab_size
    for row in rows:
        if not all(0 <= token < size for token in row):
            raise BadRequest(
                f"Token ids of the model `{model}` are 0 to {size - 1}.", part="prompt"
            )
    return list(rows)


def fit_to_context(
    engine: EmbeddingEngine, rows: list[TokenIds], *, truncate: bool
) -> tuple[list[TokenIds], set[int]]:
    """Cut over-long rows if `truncate`, and return the rows and which were cut.

    Raises ContextLengthExceeded otherwise.
    """
    limit = engine.max_tokens
    over = [index for index, row in enumerate(rows) if len(row) > limit]
    if over and not truncate:
        raise ContextLengthExceeded(limit, len(rows[over[0]]), noun="input")
    for index in over:
        rows[index] = engine.truncate(rows[index])
    return rows, set(over)
