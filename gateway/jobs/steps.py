"""The inputs and results of a chat model's engine: sequences, steps, costs, verdicts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from gateway.errors import PassFault
from gateway.jobs import TokenIds
from gateway.jobs.chat import Adapter, Calling, Compiled, Delta, Grammar, Sampling
from gateway.jobs.images import ImageSpan

Drafter: TypeAlias = Literal["prompt_lookup", "draft_model"]
DRAFTERS: Sequence[Drafter] = get_args(Drafter)
Verified: TypeAlias = Literal["transformers", "mlx-lm", "no"]  # the reference for answers


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPiece:
    """Consecutive blocks of a prompt in the prefix cache, as many as one prefix file holds."""

    salt: str  # the salt of the callers who may continue from it
    own: TokenIds
    before: "PrefixPiece | None" = None  # the piece before this one

    @property
    def tokens(self) -> list[int]:
        """Return all tokens, from the prompt's first to the last of this piece."""
        pieces = [self]
        while pieces[-1].before is not None:
            pieces.append(pieces[-1].before)
        return [token for piece in reversed(pieces) for token in piece.own]


@dataclass(frozen=True, slots=True)
class LabelStep:
    """One step through the tokens of a question's labels."""

    question: int
    # Groups of tokens that may come next, each with the indices of the labels that they belong to.
    # The probabilities of a group's tokens add up.
    entries: Sequence[tuple[TokenIds, Sequence[int]]]
    is_first: bool  # True: these are the first tokens of labels


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParams:
    """One choice of a `GenerateJob`, ready for the engine: its prompt is encoded and fits."""

    prompt: TokenIds
    max_tokens: int  # at least 1, or 0 if only the prompt is echoed; within the model's context
    sampling: Sampling
    index: int = 0  # the choice's index
    stop: Sequence[str] = ()
    logprobs: int | None = None
    echoed: Sequence[str] | None = None  # the texts of the prompt's tokens, if it is echoed
    calling: Calling | None = None
    earlier_calls: int = 0  # calls in the conversation so far
    calls_are_text: bool = False  # functions may be called, but the format of calls is not known
    thoughts_are_text: bool = False  # the format of thoughts is not known
    reads_whole: bool = False  # special tokens are spelled out, for the engine's `read_answer`
    grammar: Grammar | None = None  # constrains the text after the thinking
    compiled: Compiled | None = None
    is_either: bool = False  # the grammar allows either calls or a response format
    is_open: bool = False  # the caller set no `max_tokens`
    is_bare: bool = False  # the prompt has no template: the model's marks are plain text
    is_continued: bool = False  # the prompt ends with the answer's beginning, which is not empty
    is_thinking: bool = False  # the prompt ends inside a block of thinking
    may_think: bool = False  # the model may open such a block before its answer
    opening: str = ""  # the header that the template wrote, if answers are messages on channels
    thinking_budget: int | None = None  # also None for a model whose thoughts cannot be ended
    step: LabelStep | None = None  # the labels to judge once the prompt is read: nothing is sampled
    routing_keys: Sequence[tuple[int, bytes]] = ()  # pairs of a beginning's end and its key
    adapter: Adapter | None = None
    cache_salt: str = ""
    images: Sequence[ImageSpan] = ()  # in the order of the prompt, which has ids of their content


@dataclass(frozen=True, slots=True)
class DraftCost:
    """The bytes that drafts add to the KV of each sequence, in up to `rows` sequences at once."""

    token: int = 0  # bytes a token, in a draft model's KV
    states: int = 0  # bytes of states saved before a draft, for rolling back
    rows: int = 0


@dataclass(frozen=True, slots=True)
class KvCost:
    """The bytes of KV that a sequence takes. All are zero if they are not known."""

    token: int = 0  # bytes a token, in all layers that keep every token
    windows: tuple[tuple[int, int], ...] = ()  # each sliding window: bytes a token, most tokens
    constant: int = 0  # bytes at any length, such as states
    draft: DraftCost = DraftCost()
    plane: int = 0  # bytes a token, in the largest array
    states: int = 0  # bytes of all full windows and states

    def of(self, tokens: int, beyond: int = 0) -> int:
        """Return the bytes of this many tokens; in prefill a window holds `beyond` more tokens."""
        in_windows = sum(
            nbytes * min(tokens, max_tokens + beyond) for nbytes, max_tokens in self.windows
        )
        return self.constant + self.token * tokens + in_windows

    def __bool__(self) -> bool:
        return self.token > 0 or self != _ZERO  # the first is the faster test


_ZERO = KvCost()


@dataclass(frozen=True, slots=True)
class ImageCost:
    """The bytes that images add to a model."""

    token: int = 0  # bytes of a token of an image, while its sequence is here
    kept: int = 0  # most bytes of the features of earlier images


@dataclass(frozen=True, slots=True)
class Pass:
    """The counts of one pass, or of one step."""

    rows: int = 0
    tokens: int = 0  # tokens, not counting padding
    padded_tokens: int = 0
    forced: int = 0  # tokens forced by grammars
    drafted: int = 0
    accepted: int = 0  # accepted draft tokens
    drafter: Drafter | None = None  # the only drafter; None if there were none or several
    is_encoding: bool = False  # True: it reads no tokens, and encodes images
    encoded: int = 0  # images that have gone through the tower
    recalled: int = 0  # images whose features were at hand


@dataclass(frozen=True, slots=True)
class Verdict:
    """The results of a chat model's self-test: True if logits equal those of each sequence run
    alone, None if there is no result yet.
    """

    single: bool | None = None  # a batch of one sequence
    rows: bool | None = None  # a batch of sequences of several lengths
    prefixes: bool | None = None  # a sequence that continues from a cached prefix
    window: bool | None = None  # a sequence longer than the sliding window; tested last
    problem: str = ""  # a failure, in words
    is_lasting: bool = True  # False if memory ran out during the test, which may not happen again
    step_s: tuple[float, ...] = ()  # seconds of a decode step at 1, 2, 4, … rows, if timed
    images: bool | None = None  # an image beside text, if the model reads images

    @property
    def is_whole(self) -> bool:
        """Return True once short prompts have been tested."""
        return None not in (self.single, self.rows, self.prefixes)

    @property
    def forbids_batches(self) -> bool:
        """Return True if sequences must run one at a time."""
        return False in (self.single, self.rows, self.window, self.images)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts of a loaded chat model, which do not change."""

    max_context: int  # the most tokens of a prompt and its answer together
    kv_cost: KvCost = _ZERO
    self_test_tokens: int = 0  # tokens of the self-test's longest sequence
    unread_formats: Sequence[str] = ()  # settings of formats that don't fit the chat template
    notes: Sequence[str] = ()  # sentences about parts of the model's files that are ignored
    verified: Verified = "no"
    images: ImageCost | None = None  # None for a model that reads text alone
    is_timed_when_idle: bool = True  # False on a CPU, where wider steps have always paid


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The plan of one step of an engine, which changes its batch, in this order, then runs a pass.

    Sequences are named by ids. Each id joins once; an unknown id is ignored.
    """

    kind: Literal["prefill", "decode"] | None = None  # the kind of the pass; None for no pass
    encoding_s: float = math.inf  # seconds after which a prefill pass stops encoding images
    token_budget: int = 0  # about how many padded tokens a prefill pass reads
    leaving: Sequence[int] = ()  # sequences that leave, in any state
    preempting: Sequence[int] = ()  # their KV is freed; all their tokens are read again later
    capped: Sequence[tuple[int, int]] = ()  # ids, and the most tokens of their answers
    clear_prefixes: bool = False  # True: empty this model's prefix cache
    prefix_limit: int | None = None  # new limit in bytes, for all models that share it
    drafters: Sequence[Drafter] = DRAFTERS  # drafters whose drafts the next pass may read
    joining: Sequence[tuple[int, SequenceParams]] = ()
    parking: Sequence[int] = ()  # sequences that keep their KV, and do not decode
    resuming: Sequence[int] = ()  # parked or preempted ids; those in `parking` are parked once read


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step, and the engine's state after it. A failed sequence ends by a delta."""

    deltas: Sequence[Delta] = ()
    size: Pass = Pass()
    faults: Sequence[PassFault] = ()  # errors that the pass raised; they change no answer
    reading: frozenset[int] = frozenset()  # sequences with prompt left to read
    decoding: int = 0  # sequences that decode
    prefix_bytes: int = 0  # bytes in the prefix caches of all models that share a limit
    drafter: Drafter | None = None  # the only drafter of the pass under way, if any
