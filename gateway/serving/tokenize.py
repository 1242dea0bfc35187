"""Thread pools for work off the loop (reading bodies, tokenizing, templates, grammars,
descriptions of models and of the API), and texts that are tokenized there.

Each kind of work has its own threads, separate for long and short work.
"""

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
    "grammars",
    "checks",
    "readings",
    "descriptions",
]
THREADS: Final[dict[Kind, int]] = {
    # One thread each: reading holds the GIL, and each further thread takes from the loop's share.
    "bodies": 1,
    "large bodies": 1,
    "short texts": 2,
    "long texts": 1,
    "short prompts": 2,
    "long prompts": 1,
    "grammars": 3,
    "checks": 2,
    "readings": 1,
    "descriptions": 1,
}
# Kinds of work that a model's own files may prolong without end.
OWN: Final[frozenset[Kind]] = frozenset(
    {"short texts", "long texts", "short prompts", "long prompts", "readings"}
)
# A single text up to this length is tokenized on the loop, in 20 µs: a hop to a thread takes 300.
SHORT_CHARS: Final = 1000
# Longer requests are long work. A slice takes about a tenth of a second.
LONG_CHARS: Final = 1 << 16
SLICE_CHARS: Final = 1 << 17  # characters in a call, unless a single text is longer


class ThreadPools:
    """A context manager. At exit it drops queued calls, and does not wait for running ones. A
    cancelled call that is still queued is dropped too.

    A model's pools share all with `others` but the threads for texts and readings: its tokenizer
    may never end, and must not keep other models' waiting.
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
        """Call a function on a thread for this kind of work."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads[kind], raise_panics(function), *args
        )

    async def compile(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call a function on a thread for grammars."""
        return await self.run(function, *args, kind="grammars")

    def __enter__(self) -> "ThreadPools":
        return self

    def __exit__(self, *_: object) -> None:
        # A call that hangs would keep the gateway from exiting.
        for threads in self._own.values():
            threads.shutdown(wait=False, cancel_futures=True)


def prompt_kind(job: GenerateJob) -> Kind:
    """Return the kind of work that rendering a job's prompt is."""
    prompt = job.prompt if isinstance(job.prompt, str) else ""
    questions = [text for question in job.questions for text in (question.text, *question.labels)]
    is_long = _is_longer(LONG_CHARS, [prompt, *job.messages, *job.tools, *questions])
    if is_long:
        return "long prompts"
    return "short prompts"


def _is_longer(most_chars: int, values: list[Any]) -> bool:
    """Return True if nested values have more characters; a value other than text counts as one."""
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
    """Return the kind of work that texts of `chars` characters are."""
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
    """Return each text's token ids: on the loop if there is a single short text, which no pattern
    of the model's files is tried on, else slice by slice on a thread, in turn with the slices of
    other requests.
    """
    if len(texts) == 1 and len(texts[0]) <= SHORT_CHARS and not has_patterns:
        return list(encode(texts))
    kind = texts_kind(sum(map(len, texts)))
    # Each slice waits in the queue anew, behind those of others: long requests take turns.
    rows: list[TokenIds] = []
    for part in _slices(texts):
        rows += await pool.run(encode, part, kind=kind)
    return rows


def _slices(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the texts, at least one and up to SLICE_CHARS of them at once."""
    part: list[str] = []
    chars = 0
    for text in texts:
        if part and chars + len(text) > SLICE_CHARS:
            yield part
            part, chars = [], 0
        part.append(text)
        chars += len(text)
    yield part
