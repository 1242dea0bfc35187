"""Jobs of chat models, and their answers as they come."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from gateway.jobs import Caller, TokenIds

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


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
