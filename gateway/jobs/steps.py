"""The inputs and results of a chat model's engine: sequences, steps, costs, verdicts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from gateway.errors import PassFault
from gateway.jobs import TokenIds
from gateway.jobs.chat import Adapter, Calling, Compiled, Delta, Grammar, Sampling
from gateway.jobs.images import ImageSpan

Drafter: TypeAlias = Literal["prompt_lookup", "draft_model", "mtp_head"]
DRAFTERS: Sequence[Drafter] = get_args(Drafter)
# The library that answers were compared with.
Verified: TypeAlias = Literal["transformers", "mlx-lm", "no"]


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPiece:
    """Consecutive blocks of a prompt that one prefix file holds."""

    salt: str
    own: TokenIds
    before: "PrefixPiece | None" = None

    @property
    def tokens(self) -> list[int]:
        pieces = [self]
        while pieces[-1].before is not None:
            pieces.append(pieces[-1].before)
        return [token for piece in reversed(pieces) for token in piece.own]


@dataclass(frozen=True, slots=True)
class LabelStep:
    """One step through the tokens of a question's labels."""

    question: int
    # Groups of possible next tokens, each with the indices of its labels. The probabilities of a
    # group add up.
    entries: Sequence[tuple[TokenIds, Sequence[int]]]
    is_first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParams:
    """One choice of a `GenerateJob`, with an encoded prompt that fits the model's context."""

    prompt: TokenIds
    max_tokens: int  # 0 only if the prompt is echoed
    sampling: Sampling
    index: int = 0
    stop: Sequence[str] = ()
    logprobs: int | None = None
    echoed: Sequence[str] | None = None  # texts of the prompt's tokens, if they are returned
    calling: Calling | None = None
    earlier_calls: int = 0
    calls_are_text: bool = False  # the format of calls is not known
    thoughts_are_text: bool = False  # the format of thoughts is not known
    reads_whole: bool = False  # the engine's `read_answer` reads the answer once it is complete
    grammar: Grammar | None = None  # constrains the text after the thinking
    compiled: Compiled | None = None
    is_either: bool = False  # the grammar allows either calls or a response format
    is_open: bool = False  # the caller set no `max_tokens`
    is_bare: bool = False  # the prompt was not made by a chat template
    is_continued: bool = False  # the prompt ends with the beginning of the answer
    is_thinking: bool = False  # the prompt ends inside a block of thinking
    may_think: bool = False  # the model may think before its answer
    opening: str = ""  # the message header at the prompt's end
    thinking_budget: int | None = None  # also None if the model's thinking cannot be ended
    step: LabelStep | None = None  # labels to judge after the prompt, instead of sampling
    routing_keys: Sequence[tuple[int, bytes]] = ()  # pairs of a prefix's length and its key
    adapter: Adapter | None = None
    cache_salt: str = ""
    images: Sequence[ImageSpan] = ()


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Bytes that drafts add to each sequence's KV, for up to `rows` sequences."""

    token: int = 0  # bytes per token in a draft model's KV
    states: int = 0  # bytes of states saved to undo a draft
    rows: int = 0


@dataclass(frozen=True, slots=True)
class KvCost:
    """Bytes of a sequence's KV; all are zero if unknown."""

    token: int = 0  # bytes per token in layers that keep every token
    # Bytes per token and most tokens of each sliding window.
    windows: tuple[tuple[int, int], ...] = ()
    constant: int = 0  # bytes at any length, such as states
    draft: DraftCost = DraftCost()
    plane: int = 0  # bytes per token in the largest array
    states: int = 0  # bytes of all full windows and states

    def of(self, tokens: int, beyond: int = 0) -> int:
        """Return the bytes of this many tokens; in prefill a window holds `beyond` more tokens."""
        in_windows = sum(
            nbytes * min(tokens, max_tokens + beyond) for nbytes, max_tokens in self.windows
        )
        return self.constant + self.token * tokens + in_windows

    def __bool__(self) -> bool:
        return self.token > 0 or self != _ZERO


_ZERO = KvCost()


@dataclass(frozen=True, slots=True)
class ImageCost:
    """The bytes that images add to a model."""

    token: int = 0  # bytes per image token while its sequence runs
    kept: int = 0  # most bytes of kept features
    whole: int = 0  # most tokens of an image that one pass reads, or 0
    window: int | None = None  # most keys in the layers whose masks images open; None: all


@dataclass(frozen=True, slots=True)
class Pass:
    """The counts of one pass or step."""

    rows: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    forced: int = 0
    drafted: int = 0
    accepted: int = 0
    drafter: Drafter | None = None  # the only drafter; None if there were none or several
    is_encoding: bool = False  # True: the pass encodes images and reads no tokens
    encoded: int = 0
    recalled: int = 0  # images whose features were kept


@dataclass(frozen=True, slots=True)
class Verdict:
    """Results of a self-test: True if logits equal those of each sequence run alone.

    None means not tested yet.
    """

    single: bool | None = None  # a batch of one sequence
    rows: bool | None = None  # a batch of sequences of several lengths
    prefixes: bool | None = None  # a sequence that continues from a cached prefix
    window: bool | None = None  # a sequence longer than the sliding window
    problem: str = ""
    is_lasting: bool = True  # False: memory ran out, so a later test may pass
    step_s: tuple[float, ...] = ()  # seconds of a decode step at 1, 2, 4, … rows, if timed
    images: bool | None = None  # an image beside text, if the model reads images

    @property
    def is_whole(self) -> bool:
        """Return True once short prompts have been tested."""
        return None not in (self.single, self.rows, self.prefixes)

    @property
    def forbids_batches(self) -> bool:
        return False in (self.single, self.rows, self.window, self.images)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts of a loaded chat model, which do not change."""

    max_context: int  # the most tokens of a prompt and its answer together
    kv_cost: KvCost = _ZERO
    self_test_tokens: int = 0
    unread_formats: Sequence[str] = ()  # format settings that do not fit the chat template
    notes: Sequence[str] = ()  # sentences about parts of the model's files that are ignored
    verified: Verified = "no"
    images: ImageCost | None = None
    drafters: Sequence[Drafter] = ()  # those that the model may use
    is_timed_when_idle: bool = True  # False on a CPU: larger batches were always faster there


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The plan of one step of an engine: changes to the batch, in the order of these fields, then a
    pass.

    Unknown ids are ignored.
    """

    kind: Literal["prefill", "decode"] | None = None  # None: no pass
    encoding_s: float = math.inf  # seconds after which a prefill pass stops encoding images
    token_budget: int = 0  # about how many padded tokens a prefill pass reads
    leaving: Sequence[int] = ()
    preempting: Sequence[int] = ()  # sequences whose KV is freed, to be prefilled again later
    capped: Sequence[tuple[int, int]] = ()  # ids, each with the most tokens of its answer
    clear_prefixes: bool = False
    prefix_limit: int | None = None  # new limit of the shared prefix memory, in bytes
    drafters: Sequence[Drafter] = DRAFTERS  # drafters whose drafts the next pass may read
    joining: Sequence[tuple[int, SequenceParams]] = ()
    parking: Sequence[int] = ()  # sequences that pause and keep their KV
    # Parked or preempted sequences that go on; those in `parking` only prefill.
    resuming: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step, and the engine's state after the step."""

    deltas: Sequence[Delta] = ()
    size: Pass = Pass()
    faults: Sequence[PassFault] = ()  # errors of the pass that change no answer
    reading: frozenset[int] = frozenset()  # sequences with prompt left to read
    decoding: int = 0
    prefix_bytes: int = 0  # bytes in the prefix caches of all models that share a limit
    drafter: Drafter | None = None  # the only drafter of the pass under way
