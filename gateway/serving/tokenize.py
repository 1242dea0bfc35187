"""Thread pools for work that would block the event loop, and `tokenize`, which uses them."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal, TypeAlias, TypeVar, TypeVarTuple

from gateway.jobs import TokenIds
from gateway.jobs.chat import GenerateJob
from gateway.panics import raise_panics

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Kind: TypeAlias = Literal[
    "bodies",
    "large bodies",
    "short texts",
    "long texts",
    "short prompts",
    "long prompts",
    "image prompts",
    "grammars",
    "checks",
    "readings",
    "descriptions",
]
THREADS: Final[dict[Kind, int]] = {
    # One thread each, since parsing holds the GIL and would slow the event loop.
    "bodies": 1,
    "large bodies": 1,
    "short texts": 2,
    "long texts": 1,
    "short prompts": 2,
    "long prompts": 1,
    "image prompts": 2,
    "grammars": 3,
    "checks": 2,
    "readings": 1,
    "descriptions": 1,
}
# Kinds of work that may never end, because of patterns in a model's files.
OWN: Final[frozenset[Kind]] = frozenset(
    {"short texts", "long texts", "short prompts", "long prompts", "image prompts", "readings"}
)
# Most characters of a text that is tokenized on the event loop, in 20 µs; a thread takes 300 µs.
SHORT_CHARS: Final = 1000
LONG_CHARS: Final = 1 << 16
SLICE_CHARS: Final = 1 << 17  # characters that one call tokenizes, in about 0.1 s


class ThreadPools:
    """The thread pools for all kinds of work. A context manager: at exit, queued calls are dropped.

    A model's pools share the threads of `others`, except for the kinds in OWN, because a tokenizer
    that never ends must not block other models.
    """

    def __init__(self, others: "ThreadPools | None" = None) -> None:
        self._own: dict[Kind, ThreadPoolExecutor] = {
            kind: ThreadPoolExecutor(count, thread_name_prefix=kind.replace(" ", "-"))
            for kind, count in THREADS.items()
            if others is None or kind in OWN
        }
        shared: dict[Kind, ThreadPoolExecutor] = {} if others is None else others._threads
        self._threads: dict[Kind, ThreadPoolExecutor] = {**shared, **self._own}

    async def run(
        self, function: Callable[[*Ts], T], *args: *Ts, kind: Kind = "short prompts"
    ) -> T:
        return await asyncio.get_running_loop().run_in_executor(
            self._threads[kind], raise_panics(function), *args
        )

    async def compile(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        return await self.run(function, *args, kind="grammars")

    def __enter__(self) -> "ThreadPools":
        return self

    def __exit__(self, *_: object) -> None:
        # A running call is not waited for, since it may hang.
        for threads in self._own.values():
            threads.shutdown(wait=False, cancel_futures=True)


def prompt_kind(job: GenerateJob) -> Kind:
    """Return the kind of thread that should render a job's prompt."""
    if job.images:  # decoding images takes up to seconds
        return "image prompts"
    prompt = job.prompt if isinstance(job.prompt, str) else ""
    questions = [text for question in job.questions for text in (question.text, *question.labels)]
    is_long = _is_longer(LONG_CHARS, [prompt, *job.messages, *job.tools, *questions])
    if is_long:
        return "long prompts"
    return "short prompts"


def _is_longer(most_chars: int, values: list[Any]) -> bool:
    """Return True if nested values have more than `most_chars` characters in all."""
    chars = 0
    while values and chars <= most_chars:
        value = values.pop()
        if isinstance(value, str):
            chars += len(value)
            continue
        chars += 1
        if isinstance(value, Mapping):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            values += value
    return chars > most_chars


def texts_kind(chars: int) -> Kind:
    if chars > LONG_CHARS:
        return "long texts"
    return "short texts"


async def tokenize(
    encode: Callable[[Sequence[str]], Sequence[TokenIds]],
    texts: Sequence[str],
    pool: ThreadPools,
    *,
    has_patterns: bool = False,
) -> list[TokenIds]:
    """Return each text's token ids.

    A single short text is tokenized on the event loop, unless the tokenizer `has_patterns`, which
    may be slow.
    """
    if len(texts) == 1 and len(texts[0]) <= SHORT_CHARS and not has_patterns:
        return list(encode(texts))
    kind = texts_kind(sum(map(len, texts)))
    # Each slice is queued behind other requests' slices, so that long requests take turns.
    rows: list[TokenIds] = []
    for part in _slices(texts):
        rows += await pool.run(encode, part, kind=kind)
    return rows


def _slices(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the texts in lists of up to SLICE_CHARS; a longer text has its own list."""
    part: list[str] = []
    chars = 0
    for text in texts:
        if part and chars + len(text) > SLICE_CHARS:
            yield part
            part, chars = [], 0
        part.append(text)
        chars += len(text)
    yield part
