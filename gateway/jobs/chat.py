"""Jobs of chat models, and the parts of their answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from gateway.jobs import Caller, TokenIds
from gateway.jobs.images import ImageInput

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen; fields that OpenAI lacks follow vLLM."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 means all
    min_p: float = 0.0
    # OpenAI's two penalties count tokens of the answer, and apply before the temperature.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # Divides positive logits of the prompt's and the answer's tokens, and multiplies negative ones.
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    # Only a grammar may end an answer with fewer tokens.
    min_tokens: int = 0
    # True: `stop_token_ids` end the answer, but the model's own end tokens do not.
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    # Fields that the request does not set; the model's files may set them.
    unset: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SchemaRule:
    """A JSON Schema within a grammar of calls, and the `rule` that enforces it."""

    rule: str
    function: str  # the function whose arguments the schema describes; empty for a plain answer
    schema: str
    strict: bool


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that an answer must have.

    The source of a `choice` is a JSON array of strings; `grammar` and `calls` are in Lark's form.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar", "calls"]
    source: str  # canonical text, so that equal grammars compile once
    # True: a schema is refused unless it can be enforced whole. False: the answer is checked.
    strict: bool = False
    schemas: tuple[SchemaRule, ...] = ()
    # True: an answer that violates the schema is an error, as with `strict`.
    must_fit: bool = False


@runtime_checkable
class Compiled(Protocol):
    """A grammar that an engine has compiled."""

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Return JSON pointers to the parts of the schema that are not enforced."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call, with the JSON Schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Calling:
    """The functions that may be called."""

    functions: Sequence[Function]
    # True: the answer must be a call, and schemas are enforced even if they are not strict.
    forced: bool = False
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter of a loaded model."""

    number: int
    model: str  # the id that it is served under
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and the labels to judge as answers."""

    number: int
    text: str
    labels: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """A conversation, or a bare `prompt`, to continue `n` times."""

    caller: Caller
    messages: Sequence[Mapping[str, Any]] = ()  # the turns, as the chat template reads them
    prompt: str | TokenIds | None = None  # used instead of messages, without a template
    sampling: Sampling
    max_tokens: int | None = None  # None: the rest of the context
    stop: Sequence[str] = ()
    n: int = 1
    tools: Sequence[Mapping[str, Any]] = ()
    calling: Calling | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    grammar: Grammar | None = None
    # The number of alternatives to return with each token's logprob; None: no logprobs.
    logprobs: int | None = None
    # True: the last message is the beginning of the answer.
    continues: bool = False
    # The most tokens of thinking; None: no limit.
    thinking_budget: int | None = None
    # True: the prompt is returned too; `max_tokens` may then be 0.
    echo: bool = False
    # Questions to judge instead of generating text; each is appended to the last message.
    questions: Sequence[Question] = ()
    adapter: Adapter | None = None
    images: Sequence[ImageInput] = ()  # each has a `word` that marks its place in a turn


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts of one job, summed over its choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens from the prefix cache
    reasoning_tokens: int = 0
    kept_tokens: int = 0  # prompt tokens added to the prefix cache
    image_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Likelihood:
    """A token and its natural logprob."""

    token: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the answer, and its alternatives, likeliest first."""

    chosen: Likelihood
    top: Sequence[Likelihood] = ()


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """The tokens of an echoed prompt; `logprobs` leaves out the first token."""

    texts: Sequence[str]
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class Judgement:
    """The natural logprobs of one step into a question's labels."""

    question: int
    # Pairs of a label's index and a logprob; a label's logprob is the sum over its steps.
    logprobs: Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call; the first piece has the call's id and name."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """The next part of a choice.

    The first delta counts the prompt's tokens; the last one has a `finish_reason` or an `error`.
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
    kept_tokens: int = 0
    unkept_tokens: int = 0  # prompt tokens without room in the prefix cache
    stop: str | None = None  # the stop string that ended the answer
    prompt: EchoedPrompt | None = None
    judgement: Judgement | None = None  # the result of a LabelStep
    id: int = 0
    error: str | None = None
    is_out_of_memory: bool = False


# Deltas, and an event to log with its reason.
Reading: TypeAlias = tuple[Sequence[Delta], tuple[str, str] | None]
