"""The requests and answers of POST /v1/responses."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import (
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from typing_extensions import TypeAliasType, TypedDict

from gateway.errors import GatewayError
from gateway.errors import Part as ErrorPart
from gateway.jobs import Caller
from gateway.jobs.chat import GenerateJob, Grammar, Sampling, Usage
from gateway.wire.bounds import FAIL_FAST, Label, Name, Schema
from gateway.wire.generation import (
    ANY_OBJECT,
    NO_BUDGETS,
    THINKING_BUDGET,
    ChatTokenLogprob,
    Effort,
    MaxTokens,
    PromptTokensDetails,
    SampledRequest,
    SchemaVerdict,
    ServiceTier,
    ThinkingTokenBudget,
    json_schema,
    prompt_details,
    read_budget,
    thinking_args,
)
from gateway.wire.images import REFUSING, ImageReader
from gateway.wire.messages import to_template
from gateway.wire.responses_items import AnyItem, Item, Items, to_messages
from gateway.wire.tools import (
    OtherTool,
    ResponseFunctionTool,
    ResponseNamespace,
    ResponseToolChoice,
    ResponseTools,
    read_tools,
    select,
    unpack,
    unserved_tools,
)
from gateway.wire.validation import Part, check_length

LOGPROBS = "message.output_text.logprobs"
# The values of `include`. Only the first has an effect.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]

# Fields of chat completions that set the answer's format.
_FORMS = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
_RENAMED = "In the Responses API it is '{}'."


class TextFormat(Part):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None
    description: str | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "TextFormat":
        if self.type == "json_schema" and (self.schema_ is None or self.name is None):
            raise ValueError("type 'json_schema' needs a 'name' and a 'schema'")
        return self

    def grammar(self) -> Grammar | None:
        if self.type == "json_schema":
            param = "text.format.schema"
            return json_schema(self.schema_, param=param, strict=bool(self.strict))
        return ANY_OBJECT if self.type == "json_object" else None


class TextConfig(Part):
    """Settings of the answer's text."""

    format: TextFormat | None = None
    verbosity: Label | None = None


class Reasoning(Part):
    """Settings of the model's reasoning."""

    effort: Effort | None = None
    summary: Label | None = None  # has no effect


class ResponsesRequest(SampledRequest):
    """A request to OpenAI's Responses API."""

    harmless = frozenset(
        {
            "access_programs", "background_options", "client_metadata", "context_management",
            "image", "max_tool_calls", "prompt_cache_key",
            "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
            "stream_options", "user",
        }
    )  # fmt: skip
    refused: ClassVar = {
        "conversation": "This gateway keeps no conversations: send 'previous_response_id', or the "
        "whole conversation as 'input'.",
        "background": "A response is answered while its client waits.",
        "prompt": "This gateway keeps no prompt templates.",
        "moderation": "This gateway does not moderate.",
        "messages": _RENAMED.format("input"),
        "max_tokens": _RENAMED.format("max_output_tokens"),
        "max_completion_tokens": _RENAMED.format("max_output_tokens"),
        **dict.fromkeys(_FORMS, _RENAMED.format("text.format")),
        "reasoning_effort": _RENAMED.format("reasoning.effort"),
        "functions": _RENAMED.format("tools"),
        "function_call": _RENAMED.format("tool_choice"),
        "logprobs": f"Say 'include': ['{LOGPROBS}'] instead.",
        "n": "A response is one answer.",
    }
    neutral: ClassVar = {
        "background": (False,),
        "logprobs": (False,),
        "n": (1,),
        "response_format": ({"type": "text"},),
    }
    params: ClassVar = {
        "prompt": "input",
        "template_args": "chat_template_kwargs",
        "thinking_budget": THINKING_BUDGET,
        "answer_form": "text.format.schema",
    }
    example: ClassVar = {"input": "Hello!"}

    model: Annotated[Label, Field(min_length=1)]
    input: Items
    previous_response_id: Annotated[Label, Field(min_length=1)] | None = None
    store: bool = True  # keep the response, if the gateway stores responses
    instructions: str | None = None
    max_output_tokens: MaxTokens = None
    text: TextConfig = TextConfig()
    tools: ResponseTools
    tool_choice: ResponseToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    thinking_token_budget: ThinkingTokenBudget = None
    include: Annotated[list[Includable], FAIL_FAST, Field(default_factory=list, max_length=64)]
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: Annotated[dict[str, Any], Field(default_factory=dict)]
    service_tier: ServiceTier = "auto"
    stream: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]

    @field_validator("tool_choice", mode="wrap")
    @classmethod
    def _read_choice(cls, value: object, read: ValidatorFunctionWrapHandler) -> Any:
        try:
            return read(value)
        except ValidationError:
            raise ValueError(
                "it should be 'none', 'auto', 'required', a function's name as "
                "{'type': 'function', 'name': …}, or 'allowed_tools' of such"
            ) from None

    def param_of(self, part: ErrorPart) -> str:
        has_form = self.text.format is not None and self.text.format.type != "text"
        if part == "answer_form" and self.tools and not has_form:
            return "tools"
        return super().param_of(part)

    def locate(self, error: GatewayError) -> GatewayError:
        # OpenAI uses one code for all errors about the schema.
        located = super().locate(error)
        if error.part is None or located.param != "text.format.schema":
            return located
        return located.named(located.param, "invalid_json_schema")

    def unserved_tools(self) -> Sequence[str]:
        return unserved_tools(unpack(self.tools).functions)

    @property
    def has_references(self) -> bool:
        """Return True if the request refers to an earlier response or its items."""
        return self.previous_response_id is not None or any(
            isinstance(item, Item) and item.is_reference for item in self.input
        )

    @property
    def logprobs(self) -> int | None:
        """Return how many likely tokens to list at each position, or None for no logprobs."""
        return self.top_logprobs if LOGPROBS in self.include or self.top_logprobs else None

    @property
    def thinking_budget(self) -> int | None:
        return self.thinking_token_budget

    def template_args(self) -> dict[str, Any]:
        """Return the chat template's arguments; `chat_template_kwargs` takes precedence."""
        is_scored = self.max_output_tokens == 1 and self.logprobs is not None
        args = thinking_args(self.reasoning.effort, is_scored=is_scored)
        return {**args, **self.chat_template_kwargs}


def to_job(
    request: ResponsesRequest,
    caller: Caller,
    defaults: Sampling,
    *,
    items: Sequence[AnyItem],
    max_tokens: int | None,
    template_args: Mapping[str, Any],
    max_chars: int,
    budgets: Mapping[str, int] = NO_BUDGETS,
    images: ImageReader = REFUSING,
) -> GenerateJob:
    """Return the job of a request. Fields that the request lacks get the model's defaults."""
    # `items` is the whole conversation, which ends with the request's input.
    earlier = len(items) - len(request.input)
    toolset = unpack(request.tools)
    messages = to_template(
        to_messages(
            request.instructions, items, earlier=earlier, names=toolset.names, images=images
        )
    )
    check_length(messages, max_chars, param="input")
    selection = select(request.tool_choice, parallel=request.parallel_tool_calls)
    tools, calling = read_tools(toolset.functions, selection)
    return GenerateJob(
        caller=caller,
        messages=messages,
        sampling=request.sampling(defaults),
        max_tokens=request.max_output_tokens or max_tokens,
        stop=request.stop,
        tools=tools,
        calling=calling,
        template_args={**template_args, **request.template_args()},
        grammar=request.text.format.grammar() if request.text.format is not None else None,
        logprobs=request.logprobs,
        thinking_budget=read_budget(request.thinking_budget, request.reasoning.effort, budgets),
        images=images.decode(),
    )


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class ReasoningText(TypedDict):
    """The text of a model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(TypedDict):
    """A message of the model's answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class ReasoningItem(TypedDict):
    """The model's reasoning before its answer."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class FunctionCallItem(TypedDict):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


OutputItem = TypeAliasType("OutputItem", OutputMessage | ReasoningItem | FunctionCallItem)


class InputTokensDetails(PromptTokensDetails):
    """How many of the prompt's tokens had cached KV, and how many stand for images."""

    cache_write_tokens: int  # always 0, since no token is billed for being cached


class OutputTokensDetails(TypedDict):
    """How many of the answer's tokens are reasoning."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """The numbers of tokens read and written."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


def usage_dict(usage: Usage) -> ResponseUsage:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {**prompt_details(usage), "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ResponseError(TypedDict):
    """The error of an answer that failed after it had begun."""

    code: str
    message: str


class IncompleteDetails(TypedDict):
    """The reason why an answer was cut."""

    reason: Literal["max_output_tokens"]


class ResponseReasoning(TypedDict):
    """The requested effort of the model's reasoning."""

    effort: Effort | None
    summary: None


class ResponseText(TypedDict):
    """The requested settings of the text."""

    format: dict[str, Any]
    verbosity: str | None


class Response(TypedDict):
    """An answer of the Responses API, with the settings that were requested."""

    id: str
    object: Literal["response"]
    access_programs: None
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ResponseReasoning
    service_tier: str
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: Any
    tools: list[ResponseFunctionTool | ResponseNamespace]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: NotRequired[Any]
    gateway: NotRequired[SchemaVerdict]


class InputTokens(TypedDict):
    """The length of a prompt, in tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(TypedDict):
    """A response that was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


def new_response(
    request: ResponsesRequest, job: GenerateJob, *, response_id: str, created: int, is_kept: bool
) -> Response:
    """Return a response in progress, before its first token."""
    text_format = request.text.format or TextFormat(type="text")
    response: Response = {
        "id": response_id,
        "object": "response",
        "access_programs": None,
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata,
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": request.reasoning.effort, "summary": None},
        "service_tier": job.caller.tier.value,
        "store": is_kept,
        "temperature": job.sampling.temperature,
        "text": {
            "format": text_format.model_dump(by_alias=True, exclude_none=True),
            "verbosity": request.text.verbosity,
        },
        "tool_choice": request.model_dump(include={"tool_choice"}, exclude_none=True)[
            "tool_choice"
        ],
        "tools": [tool.to_dict() for tool in request.tools if not isinstance(tool, OtherTool)],
        "top_logprobs": request.top_logprobs,
        "top_p": job.sampling.top_p,
        "truncation": request.truncation,
        "usage": None,
    }
    user = (request.model_extra or {}).get("user")
    if user:
        response["user"] = user
    return response
