"""Which inputs share a pass and how long it waits for more; checks of inputs; cached vectors.

Only the cache keeps anything: the rest are functions of their arguments.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from gateway import metrics
from gateway.errors import BadRequest, ContextLengthExceeded
from gateway.jobs import TokenIds, Vectors
from gateway.jobs.embed import EmbedJob
from gateway.serving.admission import NO_BOUND
from gateway.serving.ports import EmbeddingEngine


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
    # The window follows the load, and `batch_window_s` is not used.
    windows: Windows | None = None
    queue_max_tokens: int = NO_BOUND
    cache_size: int = 0  # vectors that are kept
    # A pass has at most the tokens that, as measured, take so long.
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


Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TextVector:
    """A text's vector, (dimensions,), its tokens, and whether it was truncated."""

    vector: Vector
    tokens: int
    is_truncated: bool


class EmbeddingCache:
    """An LRU cache of at most `size` vectors, by a digest of the text with its prompt, and of the
    callers' salt, up to 16 bytes.
    """

    def __init__(self, model: str, size: int) -> None:
        self._size = size
        self._vectors: OrderedDict[bytes, TextVector] = OrderedDict()
        self._hits = metrics.of(metrics.EMBEDDING_CACHE, model, "hit")
        self._misses = metrics.of(metrics.EMBEDDING_CACHE, model, "miss")

    def resize(self, size: int) -> None:
        """Change the size, evicting vectors if need be."""
        self._size = size
        while len(self._vectors) > size:
            self._vectors.popitem(last=False)

    def get(self, text: str, salt: str, *, truncate: bool) -> TextVector | None:
        """Return a text's vector; that of a truncated text only if `truncate`."""
        if not self._size:
            return None
        key = _digest(text, salt)
        vector = self._vectors.get(key)
        if vector is None or (vector.is_truncated and not truncate):
            self._misses.inc()
            return None
        self._vectors.move_to_end(key)
        self._hits.inc()
        return vector

    def put(self, text: str, salt: str, vector: TextVector) -> None:
        """Keep a text's vector, evicting the least recently used one if full."""
        if not self._size:
            return
        key = _digest(text, salt)
        # A copy: the array is a view of its whole request's.
        self._vectors[key] = replace(vector, vector=vector.vector.copy())
        self._vectors.move_to_end(key)
        if len(self._vectors) > self._size:
            self._vectors.popitem(last=False)


def _digest(text: str, salt: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16, salt=salt.encode()).digest()


def add_prompts(engine: EmbeddingEngine, model: str, job: EmbedJob) -> list[str]:
    """Put the prompt that the job names, or the model's own, before each text.

    Raises BadRequest for a prompt that the model does not have.
    """
    name = job.prompt_name or engine.default_prompt_name
    if not job.texts or name is None:
        return list(job.texts)
    if name not in engine.prompts:
        names = ", ".join(sorted(engine.prompts)) or "none"
        raise BadRequest(
            f"The model `{model}` has no prompt `{name}`; it has: {names}.", part="prompt_name"
        )
    return [engine.prompts[name] + text for text in job.texts]


QUERY_PROMPTS: Final = ("query",)
DOCUMENT_PROMPTS: Final = ("document", "passage")  # Qwen3's name, and e5's


def find_prompt(engine: EmbeddingEngine, names: Sequence[str], default: str | None) -> str:
    """Return the first of the model's prompts that has one of `names`; else that of the default
    name, else of the model's own default, else none.
    """
    for name in (*names, default, engine.default_prompt_name):
        if name is not None and name in engine.prompts:
            return engine.prompts[name]
    return ""


def cosines(queries: Vectors, documents: Vectors) -> npt.NDArray[np.float64]:
    """Return (documents,): the cosine of each row with that of the query, or with its own."""
    ones, document_rows = queries.astype(np.float64), documents.astype(np.float64)
    lengths = np.linalg.norm(ones, axis=1) * np.linalg.norm(document_rows, axis=1)
    cosines: npt.NDArray[np.float64] = (ones * document_rows).sum(axis=1) / np.where(
        lengths, lengths, 1
    )
    return np.clip(cosines, -1, 1)


def check_ids(engine: EmbeddingEngine, model: str, rows: Sequence[TokenIds]) -> None:
    """Raise BadRequest for ids outside the vocabulary: MLX would read past its table."""
    size = engine.vocab_size
    for row in rows:
        if not all(0 <= token < size for token in row):
            raise BadRequest(
                f"Token ids of the model `{model}` are 0 to {size - 1}.", part="prompt"
            )


def fit_to_context(
    engine: EmbeddingEngine, rows: list[TokenIds], *, truncate: bool
) -> tuple[list[TokenIds], set[int]]:
    """Truncate over-long rows if `truncate`; return the rows, and the indices of those truncated.

    Raises ContextLengthExceeded otherwise.
    """
    limit = engine.max_tokens
    over = [index for index, row in enumerate(rows) if len(row) > limit]
    if over and not truncate:
        raise ContextLengthExceeded(limit, len(rows[over[0]]), noun="input")
    for index in over:
        rows[index] = engine.truncate(rows[index])
    return rows, set(over)
