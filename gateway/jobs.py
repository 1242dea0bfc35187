"""What floors pass to one another: jobs on the way down, vectors and deltas on the way up."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, TypeAlias, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt

from gateway.clock import Stage as Stage
from gateway.clock import Timings as Timings
from gateway.errors import PassFault

Vectors: TypeAlias = npt.NDArray[np.float32]
TokenIds: TypeAlias = Sequence[int]
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]
Drafter: TypeAlias = Literal["prompt_lookup", "draft_model"]
DRAFTERS: Sequence[Drafter] = get_args(Drafter)
Verified: TypeAlias = Literal["transformers", "mlx-lm", "no"]  # what answers were compared with


class Tier(StrEnum):
    """How urgent a job is to its caller (OpenAI's `service_tier`)."""

    PRIORITY = "priority"
    DEFAULT = "default"
    FLEX = "flex"


@dataclass(frozen=True, slots=True)
class PrefixNames:
    """A router's names for prefixes of a conversation, the shortest first: each is longer by the
    same length. Only the prefix cache reads them.
    """

    names: Sequence[bytes] = ()
    share: float = 0.0  # of the conversation, that the longest prefix takes

    def ends(self, tokens: int) -> Sequence[tuple[int, bytes]]:
        """Return about where each prefix ends, in a prompt of so many tokens."""
        step = self.share * tokens / max(1, len(self.names))
        return [(round(step * i), name) for i, name in enumerate(self.names, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Where a job comes from, and its deadline."""

    request_id: str
    deadline: float  # a reading of the monotonic clock
    allowed_s: float  # from the request's beginning to the deadline
    tier: Tier = Tier.DEFAULT
    key_id: str | None = None
    cache_salt: str = ""  # what is kept of its texts is for callers with the same (vLLM's name)
    timings: Timings = field(default_factory=Timings)
    number: int = field(default_factory=itertools.count(1).__next__)  # an id may not be unique
    prefix_names: PrefixNames = PrefixNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedJob:
    """Texts, or rows of token ids, to turn into vectors."""

    caller: Caller
    texts: Sequence[str] = ()
    token_rows: Sequence[TokenIds] = ()
    # Over-long inputs are cut as sentence-transformers does; else they are refused.
    truncate: bool = False
    # The vectors of a Matryoshka model are shortened to it.
    dimensions: int | None = None
    prompt_name: str | None = None


@dataclass(frozen=True, slots=True)
class Embedded:
    """The answer to an `EmbedJob`: (inputs, dimensions) float32, in the order of the inputs."""

    vectors: Vectors
    prompt_tokens: int
    truncated: int


@dataclass(frozen=True, slots=True)
class Pair:
    """A query and a document as one row of token ids."""

    ids: TokenIds
    second: int  # the index at which the document begins
    # Tokens cut off its end, or fewer: a long document is not encoded whole.
    cut: int = 0

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankJob:
    """Documents to score by how well each answers the query."""

    caller: Caller
    documents: Sequence[str]
    query: str = ""
    queries: Sequence[str] = ()  # in place of `query`, one for each document
    max_tokens_per_doc: int | None = None  # which documents are cut to
    # Documents are cut to what the model can read, too; else such are refused.
    truncate: bool = True
    # A score is the model's own, not one between 0 and 1.
    is_raw: bool = False
    # Of an embedding model, where it has no prompt for queries or for documents.
    prompt_name: str | None = None
    instruction: str | None = None  # for models whose prompt has one


@dataclass(frozen=True, slots=True)
class Reranked:
    """The answer to a `RerankJob`."""

    # (documents,) in the order of the documents; as float32 the best would be equal.
    scores: npt.NDArray[np.float64]
    prompt_tokens: int
    truncated: int  # texts that were cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. Fields that OpenAI lacks follow vLLM."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 means all
    min_p: float = 0.0
    # These two and the bias are added to the logits before the temperature. They count tokens of
    # the answer alone.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # Divides positive logits of the prompt's and the answer's tokens, and multiplies negative ones.
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    # For so many tokens nothing ends the answer but its grammar.
    min_tokens: int = 0
    # The model's own ends do not end the answer; `stop_token_ids` do.
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    # Fields that the request leaves unset: the model's own files may set them.
    unset: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SchemaRule:
    """A JSON Schema within a grammar of calls, and the `rule` that enforces it."""

    rule: str
    function: str  # whose parameters it describes; empty: of an answer instead of calls
    schema: str
    strict: bool


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match.

    json_schema: a JSON Schema. regex: a regular expression, of the whole answer. choice: a JSON
    array of strings, one of which is the answer. grammar: a context-free grammar in Lark's form.
    calls: the same, made by the gateway.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar", "calls"]
    source: str  # canonical: equal ones compile once
    # A JSON Schema is enforced whole or refused, and an answer that violates it is an error. Of
    # others, keywords that no grammar can enforce are checked afterwards.
    strict: bool = False
    # Of calls: the caller's own, of rules that the source lacks.
    schemas: tuple[SchemaRule, ...] = ()
    # An answer that violates it is an error, though it is not strict.
    must_fit: bool = False


@runtime_checkable
class Compiled(Protocol):
    """A grammar that an engine has compiled."""

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Return JSON pointers to the parts of its schema that it does not enforce."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function the model may call. `parameters` is the JSON Schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Calling:
    """Which functions may be called."""

    functions: Sequence[Function]
    # One of them must be. Its schema holds; that of a free call does only if it is strict.
    forced: bool = False
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter of a loaded model."""

    number: int  # among the adapters of its base
    model: str  # that it is served as
    nbytes: int = 0  # that it has added


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
class Question:
    """Number `number` of a request's questions: its text, and the answers that are judged."""

    number: int
    text: str
    labels: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """A conversation, or a bare `prompt`, to continue `n` times."""

    caller: Caller
    messages: Sequence[Mapping[str, Any]] = ()  # what the chat template reads
    prompt: str | TokenIds | None = None  # in place of messages; it takes no template
    sampling: Sampling
    max_tokens: int | None = None  # None: the rest of the context
    stop: Sequence[str] = ()
    n: int = 1
    tools: Sequence[Mapping[str, Any]] = ()  # what the chat template reads
    calling: Calling | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    grammar: Grammar | None = None
    # The likeliest alternatives to return with each token's logprob; None: no logprobs.
    logprobs: int | None = None
    # The last message is the beginning of the answer.
    continues: bool = False
    # Thoughts are ended after so many tokens; None: where the model ends them.
    thinking_budget: int | None = None
    # The prompt is returned, with its logprobs if there are any; `max_tokens` may then be 0.
    echo: bool = False
    # If there are any, no answer is written: each question's text completes the last message, and
    # its labels are judged.
    questions: Sequence[Question] = ()
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written by one job, all its choices together."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt's, not read again
    reasoning_tokens: int = 0  # of the completion's
    kept_tokens: int = 0  # of the prompt's, new in the prefix cache: whole blocks


@dataclass(frozen=True, slots=True)
class Likelihood:
    """A token, chosen or an alternative: its text, its bytes, its logprob (natural)."""

    token: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the answer, and the likeliest alternatives in its place, likeliest first."""

    chosen: Likelihood
    top: Sequence[Likelihood] = ()


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """An echoed prompt: each token's text and, if requested, the logprobs of all but the first."""

    texts: Sequence[str]
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class LabelStep:
    """One step into a question's labels."""

    question: int
    # Tokens that may come next, whose probabilities add up, and the places of their labels.
    entries: Sequence[tuple[TokenIds, Sequence[int]]]
    is_first: bool  # no token of a label comes before


@dataclass(frozen=True, slots=True)
class Judgement:
    """The logprobs (natural) of one step into a question's labels."""

    question: int
    logprobs: Sequence[tuple[int, float]]  # by the label's place; its own is the sum over its steps


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of call number `index` of a choice; the first one has its id and name."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """What a pass has made certain of one answer, which a `finish_reason` or an `error` ends."""

    index: int  # of the choice in its job
    text: str = ""
    tokens: int = 0
    finish_reason: FinishReason | None = None
    reasoning: str = ""
    call: CallDelta | None = None
    logprobs: Sequence[TokenLogprob] = ()
    reasoning_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, not read again: in the first delta
    kept_tokens: int = 0  # of the prompt, new in the prefix cache: in the first delta
    unkept_tokens: int = 0  # of the prompt, which the prefix cache has no room for: likewise
    stop: str | None = None  # the stop string that ended it: in the last delta
    prompt: EchoedPrompt | None = None  # in the first delta, if it is echoed
    judgement: Judgement | None = None  # of a step into a question's labels: in its only delta
    id: int = 0  # its sequence's
    error: str | None = None
    is_out_of_memory: bool = False  # the error is that of a device without memory


Reading: TypeAlias = tuple[Sequence[Delta], tuple[str, str] | None]  # an event to log, and why


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
    beginning: Sequence[tuple[int, bytes]] = ()  # where parts with a router's name end, and names
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
    """What came of a step, and the engine's state after it. A row that fails ends by a delta."""

    deltas: Sequence[Delta] = ()
    size: Pass = Pass()
    faults: Sequence[PassFault] = ()  # what its pass has raised; no answer is changed by it
    reading: frozenset[int] = frozenset()  # rows with prompt left to read
    decoding: int = 0  # rows that decode
    prefix_bytes: int = 0  # of KV that is kept of prompts, by all models that share a limit
    drafter: Drafter | None = None  # whose drafts the pass under way reads, if they are of one
