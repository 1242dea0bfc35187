"""What a chat model's engine is given and returns: sequences, steps, costs, verdicts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from gateway.errors import PassFault
from gateway.jobs import TokenIds
from gateway.jobs.chat import Adapter, Calling, Compiled, Delta, Grammar, Sampling

Drafter: TypeAlias = Literal["prompt_lookup", "draft_model"]
DRAFTERS: Sequence[Drafter] = get_args(Drafter)
Verified: TypeAlias = Literal["transformers", "mlx-lm", "no"]  # what answers were compared with


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPiece:
    """Blocks that are kept of prompts and follow one another, as many as a file has."""

    salt: str  # of the callers who may go on from it
    own: TokenIds
    before: "PrefixPiece | None" = None  # that it follows

    @property
    def tokens(self) -> list[int]:
        """Return all tokens from the prompt's first to its own last."""
        pieces = [self]
        while pieces[-1].before is not None:
            pieces.append(pieces[-1].before)
        return [token for piece in reversed(pieces) for token in piece.own]


@dataclass(frozen=True, slots=True)
class LabelStep:
    """One step into a question's labels."""

    question: int
    # Tokens that may come next, whose probabilities add up, and the places of their labels.
    entries: Sequence[tuple[TokenIds, Sequence[int]]]
    is_first: bool  # no token of a label comes before


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParams:
    """One choice of a `GenerateJob`, ready for the engine: its prompt is encoded and fits."""

    prompt: TokenIds
    max_tokens: int  # at least 1, or 0 if only the prompt is echoed; within the model's context
    sampling: Sampling
    index: int = 0  # of the choice
    stop: Sequence[str] = ()
    logprobs: int | None = None
    echoed: Sequence[str] | None = None  # the texts of the prompt's tokens, if it is echoed
    calling: Calling | None = None
    earlier_calls: int = 0  # of the conversation so far
    calls_are_text: bool = False  # functions may be called, in a format that is not known
    thoughts_are_text: bool = False  # the format of thoughts is not known
    reads_whole: bool = False  # its text has special tokens spelled, for the engine's `read_answer`
    grammar: Grammar | None = None  # of what comes after the thinking
    compiled: Compiled | None = None
    is_either: bool = False  # the answer has a form, or is calls
    is_open: bool = False  # the caller set no `max_tokens`
    is_bare: bool = False  # the prompt has no template: the model's marks are plain text
    is_continued: bool = False  # the prompt ends with the answer's beginning, which is not empty
    is_thinking: bool = False  # the prompt ends inside a block of thinking
    may_think: bool = False  # the model may open one before its answer
    opening: str = ""  # the message on a channel that the template has begun
    thinking_budget: int | None = None  # also None for a model whose thoughts cannot be ended
    step: LabelStep | None = None  # the prompt is read and these are judged: nothing is sampled
    routing_keys: Sequence[tuple[int, bytes]] = ()  # each after the end of its beginning
    adapter: Adapter | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class DraftCost:
    """The bytes that drafts take beside a sequence's own KV, in up to `rows` sequences at once."""

    token: int = 0  # a draft model's KV of a token
    states: int = 0  # states from before a draft, to go back to
    rows: int = 0


@dataclass(frozen=True, slots=True)
class KvCost:
    """The bytes of KV that a sequence takes; the zero cost is that of a model without counts."""

    token: int = 0  # a token's, in all layers that keep every token
    windows: tuple[tuple[int, int], ...] = ()  # a sliding window's: bytes a token, tokens at most
    constant: int = 0  # whatever the length, such as states
    draft: DraftCost = DraftCost()
    plane: int = 0  # a token's, in the largest array
    states: int = 0  # all full windows and states

    def of(self, tokens: int, beyond: int = 0) -> int:
        """Return the bytes of so many tokens; in prefill a window holds `beyond` its size, too."""
        in_windows = sum(
            nbytes * min(tokens, max_tokens + beyond) for nbytes, max_tokens in self.windows
        )
        return self.constant + self.token * tokens + in_windows

    def __bool__(self) -> bool:
        return self != _ZERO


_ZERO = KvCost()


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass, or what one step gave."""

    rows: int = 0
    tokens: int = 0  # without padding
    padded_tokens: int = 0
    forced: int = 0  # by grammars
    drafted: int = 0
    accepted: int = 0  # of the drafted ones
    drafter: Drafter | None = None  # of all of them; None of none, or if there were several


@dataclass(frozen=True, slots=True)
class Verdict:
    """The results of a chat model's self-test: whether logits are those of the sequence alone. None
    where it has no result yet.
    """

    single: bool | None = None  # of a sequence in a batch of its own
    rows: bool | None = None  # of several lengths in a batch
    prefixes: bool | None = None  # of one that continues from a cached prefix
    window: bool | None = None  # of one longer than the model's sliding window; tested last
    problem: str = ""  # a failure, in words
    is_lasting: bool = True  # False if memory ran out during the test, which may not happen again
    step_s: tuple[float, ...] = ()  # seconds of a decode step of 1, 2, 4, … rows, as far as known

    @property
    def is_whole(self) -> bool:
        """Return True once short prompts have been tested."""
        return None not in (self.single, self.rows, self.prefixes)

    @property
    def forbids_batches(self) -> bool:
        """Return True if sequences must run one at a time."""
        return False in (self.single, self.rows, self.window)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What does not change of a chat model that is loaded."""

    max_context: int  # tokens that a prompt and its answer have together
    kv_cost: KvCost = _ZERO
    self_test_tokens: int = 0  # of the self-test's longest sequence
    unread_formats: Sequence[str] = ()  # the settings of formats that don't fit its chat template
    notes: Sequence[str] = ()  # sentences on what of its files is not followed
    verified: Verified = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What an engine does in one step: it changes its batch, in this order, then runs a pass.

    Sequences are named by ids, each of which joins once; an unknown one is ignored.
    """

    kind: Literal["prefill", "decode"] | None = None  # of the pass; None for no pass
    token_budget: int = 0  # padded tokens that a prefill pass reads, about
    leaving: Sequence[int] = ()  # in whatever state they are
    preempting: Sequence[int] = ()  # their KV is freed; all their tokens are read again later
    capped: Sequence[tuple[int, int]] = ()  # ids, and the most tokens of their answers
    clear_prefixes: bool = False  # of this model
    prefix_limit: int | None = None  # bytes, from now on, of all models that share them
    drafters: Sequence[Drafter] = DRAFTERS  # whose drafts the pass after this one may read
    joining: Sequence[tuple[int, SequenceParams]] = ()
    parking: Sequence[int] = ()  # they keep their KV, and do not decode
    resuming: Sequence[int] = ()  # parked or preempted before; if parked too, once they are read


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step, and the engine after it. A sequence that fails ends by a delta."""

    deltas: Sequence[Delta] = ()
    size: Pass = Pass()
    faults: Sequence[PassFault] = ()  # what its pass has raised; no answer is changed by it
    reading: frozenset[int] = frozenset()  # sequences with prompt left to read
    decoding: int = 0  # sequences that decode
    prefix_bytes: int = 0  # of KV that is kept of prompts, by all models that share a limit
    drafter: Drafter | None = None  # whose drafts the pass under way reads, if they are of one
