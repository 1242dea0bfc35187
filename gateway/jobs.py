"""What crosses floors: a caller's job going down, vectors and deltas coming up."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Vectors: TypeAlias = npt.NDArray[np.float32]
TokenIds: TypeAlias = Sequence[int]
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


class Tier(StrEnum):
    """How urgent the caller says a job is (OpenAI's `service_tier`)."""

    PRIORITY = "priority"
    DEFAULT = "default"
    FLEX = "flex"


class Stage(StrEnum):
    """Where a request's time goes."""

    PARSE = "parse"
    LOAD = "load"
    TOKENISE = "tokenise"
    COMPILE = "compile"
    QUEUE = "queue"
    LANE = "lane"
    INFERENCE = "inference"
    PREFILL = "prefill"
    DECODE = "decode"
    SERIALISE = "serialise"


@dataclass(slots=True)
class Timings:
    """Where one request's time went, written by whoever spends it; all in seconds.

    An embedding is inferred, an answer prefilled (until its first token, at `first_token`) and
    decoded. `started` and `first_token` are readings of the monotonic clock. `beside` are those
    of jobs that run beside the one that is timed, for the same request. `stage` is what is being
    done for it, or was when it was given up; None before and after.
    """

    started: float = field(default_factory=time.perf_counter)
    model: str | None = None
    stage: Stage | None = None
    seconds: dict[Stage, float] = field(default_factory=dict)
    first_token: float | None = None
    tokens_in: int = 0
    tokens_out: int = 0
    beside: list["Timings"] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Count all the request's tokens so far, read and written."""
        return self.tokens_in + self.tokens_out + sum(each.tokens for each in self.beside)

    def add(self, stage: Stage, seconds: float) -> None:
        """Count seconds spent in a stage."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, and until when: `deadline` is a reading of the monotonic clock, `allowed_s` the
    seconds it was away when they asked.
    """

    request_id: str
    deadline: float
    allowed_s: float
    tier: Tier = Tier.DEFAULT
    key_id: str | None = None
    timings: Timings = field(default_factory=Timings)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedJob:
    """Texts, or rows of token ids, to turn into vectors.

    `truncate` cuts over-long inputs as sentence-transformers does; else they are refused.
    `dimensions` shortens the vectors of a Matryoshka model.
    """

    caller: Caller
    texts: Sequence[str] = ()
    token_rows: Sequence[TokenIds] = ()
    truncate: bool = False
    dimensions: int | None = None
    prompt_name: str | None = None


@dataclass(frozen=True, slots=True)
class Embedded:
    """The answer to an `EmbedJob`: (inputs, dimensions) float32, in the order asked."""

    vectors: Vectors
    prompt_tokens: int
    truncated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. A temperature of 0 is greedy; `top_k` 0 means all.

    Penalties and bias follow OpenAI: they are added to the logits before the temperature, and
    penalties count generated tokens only.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match; `source` is canonical text, so that equal ones compile once.

    json_schema: a JSON Schema. regex: a regular expression, of the whole answer. choice: a JSON
    array of strings, one of which is the answer. grammar: a context-free grammar in Lark's form.
    calls: the same, of our own making.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar", "calls"]
    source: str


@dataclass(frozen=True, slots=True)
class Function:
    """A function the model may call. `parameters` is the JSON Schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Calling:
    """Which functions may be called, and whether one of them must be.

    A forced call is held to its schema, token by token; a free one only where the function is
    strict.
    """

    functions: Sequence[Function]
    forced: bool = False
    parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """A conversation, or a bare `prompt`, to continue `n` times.

    `max_tokens` None means the rest of the context. `messages` and `tools` are what the model's
    chat template reads; `prompt`, text or token ids, takes no template. `logprobs` asks for each
    token's logprob and that many of the likeliest beside it; None for none at all. `grammar_param`
    is the field that asked for the grammar.
    """

    caller: Caller
    messages: Sequence[Mapping[str, Any]] = ()
    prompt: str | TokenIds | None = None
    sampling: Sampling
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    n: int = 1
    tools: Sequence[Mapping[str, Any]] = ()
    calling: Calling | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    grammar: Grammar | None = None
    grammar_param: str = "response_format"
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written by one job, all its choices together.

    `reasoning_tokens` are among the completion's, `cached_tokens` among the prompt's.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Likelihood:
    """A token that was or might have been: its text, its own bytes, its natural logprob."""

    token: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the answer, and the likeliest of its place, likeliest first."""

    chosen: Likelihood
    top: Sequence[Likelihood] = ()


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New in the call number `index` of a choice: id and name come once, first."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in choice `index`: text, reasoning or a piece of a call.

    The first delta of a choice tells its `cached_tokens`, the last one its `finish_reason`.
    """

    index: int
    text: str = ""
    tokens: int = 0
    finish_reason: FinishReason | None = None
    reasoning: str = ""
    call: CallDelta | None = None
    logprobs: Sequence[TokenLogprob] = ()
    reasoning_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowJob:
    """One choice of a `GenerateJob`, ready for the engine: its prompt is encoded and fits.

    `max_tokens` is at least 1 and, with the prompt, within the model's context; `is_open` tells
    that the caller has set no bound. `is_bare` tells
    that no template made the prompt, so that the model's marks are just text. `is_thinking`
    tells that the prompt ends inside a block of thinking, `may_think` that the model may open one
    first: the grammar begins after it. `compiled` is what the engine made of `grammar`.
    """

    prompt: TokenIds
    max_tokens: int
    sampling: Sampling
    stop: Sequence[str] = ()
    logprobs: int | None = None
    calling: Calling | None = None
    grammar: Grammar | None = None
    is_open: bool = False
    is_bare: bool = False
    is_thinking: bool = False
    may_think: bool = False
    compiled: object | None = None


@dataclass(frozen=True, slots=True)
class Pass:
    """What one call of a chat engine had on the device: rows, their tokens, padding included or
    not.
    """

    rows: int = 0
    tokens: int = 0
    padded_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RowDelta:
    """What one step gave one row. After a `finish_reason` or an `error` the row is gone.

    Its first delta has `cached_tokens`: how many of its prompt's were not read again.
    """

    row: int
    text: str = ""
    tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    reasoning: str = ""
    call: CallDelta | None = None
    logprobs: Sequence[TokenLogprob] = ()
    reasoning_tokens: int = 0
    cached_tokens: int = 0
