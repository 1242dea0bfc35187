"""Jobs of chat models, and their answers as they come."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from gateway.jobs import Caller, TokenIds
from gateway.jobs.images import ImageInput

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
    # Nothing but its grammar ends an answer with fewer tokens.
    min_tokens: int = 0
    # True: only `stop_token_ids` end the answer, not the model's own ends.
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    # Fields that the request leaves unset: the model's own files may set them.
    unset: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SchemaRule:
    """A JSON Schema within a grammar of calls, and the `rule` that enforces it."""

    rule: str
    function: str  # the owner of the parameters; empty for an answer instead of calls
    schema: str
    strict: bool


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that an answer must have.

    json_schema: a JSON Schema. regex: a regular expression for the whole answer. choice: a JSON
    array of strings, one of which is the answer. grammar: a context-free grammar in Lark's form.
    calls: the same form, made by the gateway.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar", "calls"]
    source: str  # canonical text: equal sources compile once
    # True: the JSON Schema is enforced whole or refused, and an answer that violates it is an
    # error. False: keywords that no grammar can enforce are checked afterwards.
    strict: bool = False
    # The caller's own schemas in a grammar of calls, for rules that the source lacks.
    schemas: tuple[SchemaRule, ...] = ()
    # True: an answer that violates the schema is an error, though the schema is not strict.
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
    """The functions that may be called."""

    functions: Sequence[Function]
    # True: one of them must be called, and its schema is enforced. The schema of a free call is
    # enforced only if it is strict.
    forced: bool = False
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter of a loaded model."""

    number: int  # its number among the adapters of its base
    model: str  # the model that it is served as
    nbytes: int = 0  # bytes that it has added


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
    messages: Sequence[Mapping[str, Any]] = ()  # the turns, as the chat template reads them
    prompt: str | TokenIds | None = None  # instead of messages; it takes no template
    sampling: Sampling
    max_tokens: int | None = None  # None: the rest of the context
    stop: Sequence[str] = ()
    n: int = 1
    tools: Sequence[Mapping[str, Any]] = ()  # the tools, as the chat template reads them
    calling: Calling | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    grammar: Grammar | None = None
    # The likeliest alternatives to return with each token's logprob; None: no logprobs.
    logprobs: int | None = None
    # The last message is the beginning of the answer.
    continues: bool = False
    # The most tokens of thinking, which is then ended; None: the model ends it.
    thinking_budget: int | None = None
    # True: the prompt is returned, with its logprobs if requested; `max_tokens` may then be 0.
    echo: bool = False
    # Questions replace the answer: each question's text completes the last message, and its labels
    # are judged.
    questions: Sequence[Question] = ()
    adapter: Adapter | None = None
    images: Sequence[ImageInput] = ()  # the texts of the turns have their words


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written by one job, all its choices together."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens not read again
    reasoning_tokens: int = 0  # completion tokens of reasoning
    kept_tokens: int = 0  # prompt tokens new in the prefix cache: whole blocks
    image_tokens: int = 0  # prompt tokens that stand for images


@dataclass(frozen=True, slots=True)
class Likelihood:
    """A chosen token or an alternative: its text, its bytes, its logprob (natural)."""

    token: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the answer, and the likeliest alternatives to it, likeliest first."""

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
    # Pairs of a label's place and a logprob; the label's own is the sum over its steps.
    logprobs: Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of call number `index` of a choice; the first one has its id and name."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """The part of an answer that a pass made certain. `finish_reason` or `error` ends it."""

    index: int  # the choice's index in its job
    text: str = ""
    tokens: int = 0
    finish_reason: FinishReason | None = None
    reasoning: str = ""
    call: CallDelta | None = None
    logprobs: Sequence[TokenLogprob] = ()
    reasoning_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens not read again: in the first delta
    kept_tokens: int = 0  # prompt tokens new in the prefix cache: in the first delta
    unkept_tokens: int = 0  # prompt tokens without room in the prefix cache: in the first delta
    stop: str | None = None  # the stop string that ended it: in the last delta
    prompt: EchoedPrompt | None = None  # the echoed prompt, if any: in the first delta
    judgement: Judgement | None = None  # result of a step into a question's labels: the only delta
    id: int = 0  # the sequence's id
    error: str | None = None
    is_out_of_memory: bool = False  # True: the device had no memory


Reading: TypeAlias = tuple[Sequence[Delta], tuple[str, str] | None]  # an event to log, its reason
