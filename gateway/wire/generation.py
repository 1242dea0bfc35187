"""Fields and answers that the endpoints for generated text share."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal, NotRequired

import orjson
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from typing_extensions import TypedDict

from gateway.errors import BadRequest
from gateway.jobs import Tier
from gateway.jobs.chat import Calling, Grammar, Sampling, TokenLogprob, Usage
from gateway.wire.bounds import (
    FAIL_FAST,
    NAME_CHARS,
    ChoiceTexts,
    GrammarText,
    Name,
    Regex,
    Schema,
    SchemaOrText,
    at_most,
    parse,
)
from gateway.wire.validation import Part, Request

MAX_STOPS = 64  # OpenAI takes 4, but other servers' clients send more
StopText = Annotated[str, Field(max_length=NAME_CHARS)]
StopTexts = Annotated[list[StopText], FAIL_FAST, Field(max_length=MAX_STOPS)]


def read_stops(value: str | list[str]) -> Sequence[str]:
    texts = [value] if isinstance(value, str) else value
    return tuple(filter(None, texts))


def _read_token_limit(value: object) -> object:
    # JSON has one type of number, so 12.0 is an integer. Other servers take -1 as no limit.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is int and value == -1:
        return None
    return value


MaxTokens = Annotated[
    Annotated[int, Field(ge=1)] | None,
    BeforeValidator(_read_token_limit),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"enum": [-1, None]}]}),
]
MaxTokensOrZero = Annotated[  # 0 scores a prompt without generating
    Annotated[int, Field(ge=0)] | None,
    BeforeValidator(_read_token_limit),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"enum": [-1, None]}]}),
]
ServiceTier = Literal["auto", "default", "flex", "priority", "scale", "fast", "ultrafast"]
MAX_BIASED_TOKENS = 1024  # OpenAI takes 300
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


def read_sampling(request: Request, names: set[str], defaults: Sampling) -> Sampling:
    """Return `defaults`, overridden by the fields in `names` that the request has."""
    fields = request.model_dump(include=names, exclude_none=True)
    if fields.get("top_k") == -1:  # vLLM's value for all tokens
        fields["top_k"] = 0
    return replace(defaults, **fields, unset=defaults.unset - fields.keys())


class SampledRequest(Request):
    """The sampling fields of OpenAI and vLLM."""

    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**31)]],
        FAIL_FAST,
        Field(default_factory=list, max_length=256),
    ]
    stop: Annotated[StopText | StopTexts, AfterValidator(read_stops), Field(default_factory=tuple)]
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    logit_bias: Annotated[
        dict[str, Bias],
        at_most(MAX_BIASED_TOKENS),
        Field(
            default_factory=dict,
            json_schema_extra={
                "propertyNames": {"pattern": "^[0-9]{1,19}$"},
                "maxProperties": MAX_BIASED_TOKENS,
            },
        ),
    ]

    @field_validator("logit_bias")
    @classmethod
    def _check_bias_keys(cls, value: dict[str, float]) -> dict[str, float]:
        if not all(token.isascii() and token.isdigit() and len(token) < 20 for token in value):
            raise ValueError("its keys should be token ids")
        return value

    def sampling(self, defaults: Sampling) -> Sampling:
        names = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
        return replace(
            read_sampling(self, names, defaults),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            seed=self.seed,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=frozenset(self.stop_token_ids),
        )


def read_tier(name: str) -> Tier:
    """Return the tier of a `service_tier`, or the default for a tier that the gateway lacks."""
    return Tier(name) if name in list(Tier) else Tier.DEFAULT


ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


class Form(Part):
    """A format that the answer must have."""

    # Unknown keys are refused, since they might ask for a different format.
    model_config = ConfigDict(extra="forbid")


class JsonSchema(Form):
    """A JSON Schema and its name."""

    name: Name = "response"
    description: str | None = None  # has no effect
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None  # refuse a schema that no grammar can enforce completely


class ResponseFormat(Form):
    """The answer's format, as OpenAI's or TGI's API writes it."""

    # TGI's types are `json`, and `json_object` with a schema as `value`.
    type: Literal["text", "json_object", "json_schema", "json"]
    json_schema: JsonSchema | None = None
    value: SchemaOrText | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type 'json_schema' needs a 'json_schema'")
        if self.json_schema and self.json_schema.strict and self.json_schema.schema_ is None:
            raise ValueError("a strict 'json_schema' needs a 'schema'")
        if self.type == "json" and self.value is None:
            raise ValueError("type 'json' needs a 'value', which is a schema")
        if self.value is not None and self.type not in ("json", "json_object"):
            raise ValueError(f"a 'value' does not go with type '{self.type}'")
        return self

    def forms(self, param: str) -> list[tuple[str, Grammar]]:
        """Return the path and the grammar of each field that asks for a format."""
        if self.type == "text":
            return []
        forms = []
        if self.json_schema is not None:
            form = self.json_schema
            grammar = json_schema(form.schema_, param=param, strict=bool(form.strict))
            forms.append((f"{param}.json_schema", grammar))
        if self.value is not None:
            forms.append((f"{param}.value", json_schema(self.value, param=param)))
        return forms or [(param, ANY_OBJECT)]


class StructuredOutputs(Form):
    """The answer's format, as vLLM's API writes it."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Regex | None = None
    choice: ChoiceTexts | None = None
    grammar: GrammarText | None = None

    @model_validator(mode="after")
    def _check_not_empty(self) -> "StructuredOutputs":
        if all(value is None for _, value in self):
            names = (name.removesuffix("_") for name, _ in self)
            raise ValueError(f"it should have one of {', '.join(names)}")
        return self

    def forms(self, param: str) -> list[tuple[str, Grammar]]:
        grammars = {}
        if self.json_ is not None:
            grammars["json"] = json_schema(self.json_, param=param)
        if self.json_object:
            grammars["json_object"] = ANY_OBJECT
        if self.regex is not None:
            grammars["regex"] = Grammar("regex", self.regex)
        if self.choice is not None:
            grammars["choice"] = Grammar("choice", orjson.dumps(self.choice).decode())
        if self.grammar is not None:
            grammars["grammar"] = Grammar("grammar", self.grammar)
        return [(f"{param}.{name}", grammar) for name, grammar in grammars.items()]


def json_schema(
    schema: dict[str, Any] | str | None,
    *,
    param: str,
    strict: bool = False,
    must_fit: bool = False,
) -> Grammar:
    """Return the grammar of a schema, or of any object if the schema is None.

    A `strict` schema is refused unless a grammar enforces all of it. With `strict` or `must_fit`,
    an answer that violates the schema is an error.
    """
    if schema is None:
        return ANY_OBJECT
    if isinstance(schema, str):
        try:
            schema = parse(schema.encode())
        except ValueError as error:
            raise BadRequest(f"The schema is not JSON: {error}.", param=param) from None
    # Keys are not sorted, since the model writes them in the schema's order.
    source = orjson.dumps(schema).decode()
    return Grammar("json_schema", source, strict=strict, must_fit=must_fit)


def one_form(forms: Sequence[tuple[str, Grammar]]) -> tuple[str, Grammar]:
    """Return the first field's name and grammar. Raises BadRequest if the formats differ."""
    # Clients for several servers set the field of each server.
    (name, grammar), *others = forms
    for other_name, other in others:
        if _meaning(other) != _meaning(grammar):
            raise BadRequest(
                f"'{name}' and '{other_name}' ask for different formats: send only one of them.",
                param=other_name,
            )
    return name, grammar


def _meaning(grammar: Grammar) -> tuple[str, str | bytes]:
    if grammar.kind == "json_schema":
        schema = orjson.loads(grammar.source)
        return grammar.kind, orjson.dumps(schema, option=orjson.OPT_SORT_KEYS)
    return grammar.kind, grammar.source


class StructuredRequest(SampledRequest):
    """A request that may ask for a format of the answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: Regex | None = None
    guided_choice: ChoiceTexts | None = None
    guided_grammar: GrammarText | None = None

    def form(self) -> tuple[str, Grammar | None]:
        """Return the name of the field that sets the answer's format, and its grammar or None.

        Raises BadRequest if two fields ask for different formats.
        """
        forms = self.forms()
        if not forms:
            return "response_format", None
        name, grammar = one_form(forms)
        return name.partition(".")[0], grammar

    def forms(self) -> list[tuple[str, Grammar]]:
        forms: list[tuple[str, Grammar]] = []
        if self.response_format is not None:
            forms += self.response_format.forms("response_format")
        if self.structured_outputs is not None:
            forms += self.structured_outputs.forms("structured_outputs")
        for name in ("json", "regex", "choice", "grammar"):
            field = f"guided_{name}"
            value = getattr(self, field)
            if value is not None:
                outputs = StructuredOutputs.model_validate({name: value})
                forms += [(field, grammar) for _, grammar in outputs.forms(field)]
        return forms


def require_free(grammar: Grammar | None, form_param: str, calling: Calling | None) -> None:
    """Raise BadRequest if a request to continue an answer also asks for a format or a call."""
    param = form_param
    if grammar is None:
        if calling is None or not calling.forced:
            return
        param = "tool_choice"
    raise BadRequest(
        "An answer that is continued can't be forced into a format or a call.", param=param
    )


def schema_from_prompt(grammar: Grammar | None, prompt: str) -> Grammar | None:
    # Some clients write the schema into the prompt, where small models do not follow it.
    if grammar != ANY_OBJECT:
        return grammar
    try:
        schema = parse(prompt.rsplit("\n\n", 1)[-1].encode())
    except ValueError:
        return grammar
    is_schema = isinstance(schema, dict) and isinstance(schema.get("properties"), dict)
    return json_schema(schema, param="messages") if is_schema else grammar


class StreamOptions(Part):
    """Options for a stream."""

    harmless = frozenset({"include_obfuscation"})

    include_usage: bool = False


THINKING_BUDGET = "thinking_token_budget"  # vLLM's name
ThinkingTokenBudget = Annotated[int, Field(ge=0)] | None
NO_BUDGETS: Mapping[str, int] = MappingProxyType({})


def read_budget(asked: int | None, effort: str | None, own: Mapping[str, int]) -> int | None:
    """Return `asked`, or else the model's limit of thinking tokens for this effort."""
    if asked is not None:
        return asked
    default = own.get("default")
    return default if effort is None else own.get(effort, default)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def thinking_args(effort: Effort | None, *, is_scored: bool) -> dict[str, Any]:
    # A request for the logprobs of one token (`is_scored`) wants no thinking.
    if is_scored or effort in ("none", "minimal"):
        return {"enable_thinking": False}
    if effort is None:
        return {}
    return {"enable_thinking": True, "reasoning_effort": effort}


class PromptTokensDetails(TypedDict):
    """How many of the prompt's tokens had cached KV, and how many are those of images."""

    cached_tokens: int
    image_tokens: NotRequired[int]


class CompletionTokensDetails(TypedDict):
    """How many of the answer's tokens are reasoning."""

    reasoning_tokens: int


class CompletionUsage(TypedDict):
    """The numbers of tokens read and written, for all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(TypedDict):
    """A token and its logprob."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """A token of the answer, with the likeliest tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(TypedDict):
    """The logprobs of every token of a text."""

    content: list[ChatTokenLogprob]
    refusal: None


class Heading(TypedDict):
    """The fields that every chunk of a completion repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class SchemaVerdict(TypedDict):
    """How well an answer was held to its schema."""

    unenforced: list[str]  # parts of the schema that no grammar enforced
    schema_valid: bool | None  # null if unknown


def logprobs_dict(logprobs: Sequence[TokenLogprob]) -> ChoiceLogprobs:
    return {"content": [token_dict(logprob) for logprob in logprobs], "refusal": None}


def token_dict(logprob: TokenLogprob) -> ChatTokenLogprob:
    tokens: list[TopLogprob] = [
        {"token": token.token, "logprob": token.logprob, "bytes": list(token.bytes)}
        for token in (logprob.chosen, *logprob.top)
    ]
    first, *top = tokens
    return {**first, "top_logprobs": top}


def prompt_details(usage: Usage) -> PromptTokensDetails:
    details: PromptTokensDetails = {"cached_tokens": usage.cached_tokens}
    if usage.image_tokens:
        details["image_tokens"] = usage.image_tokens
    return details


def usage_dict(usage: Usage) -> CompletionUsage:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": prompt_details(usage),
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
