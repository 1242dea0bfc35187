"""The requests, answers, errors and models of Anthropic's Messages API."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import TypeAliasType, TypedDict

from gateway.errors import BadRequest, ContextLengthExceeded, GatewayError, NoRoom, Overloaded
from gateway.errors import Part as ErrorPart
from gateway.jobs import Caller
from gateway.jobs.chat import Calling, GenerateJob, Grammar, Sampling, Usage
from gateway.wire.anthropic_blocks import (
    InputMessage,
    SystemPrompt,
    is_continuation,
    to_turns,
)
from gateway.wire.bounds import FAIL_FAST, ITEM_LIMIT, Label, Schema
from gateway.wire.generation import (
    NO_BUDGETS,
    SchemaVerdict,
    StopTexts,
    json_schema,
    one_form,
    read_budget,
    read_sampling,
    read_stops,
    require_free,
)
from gateway.wire.images import REFUSING, ImageReader
from gateway.wire.tools import (
    AnthropicTools,
    ToolChoiceParam,
    check_input_schemas,
    read_tools,
    select,
    unserved_tools,
)
from gateway.wire.validation import Part, Request, check_length, find_place, read_limit

Thoughts = Literal["whole", "signed", "none"]  # `signed` shows only the signature


class ThinkingConfig(Part):
    """Whether the model may think before it answers, and whether the thinking is shown."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1024)] | None = None  # Anthropic's minimum
    display: Literal["summarized", "omitted"] = "summarized"

    @property
    def unread(self) -> frozenset[str]:
        return frozenset() if self.type == "enabled" else frozenset({"budget_tokens"})


class OutputFormat(Part):
    """A JSON Schema for the answer's text."""

    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputConfig(Part):
    """The effort of the model's thinking, and the format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountMessageTokensRequest(Request):
    """A request to count the tokens of a prompt."""

    harmless = frozenset(
        {
            *("cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed"),
            *("user_profile_id", "workspace_id"),
        }
    )
    refused: ClassVar = {
        "mcp_servers": "This gateway calls no servers of tools: its clients do.",
        "thread": "This gateway keeps no conversations: send the whole one as 'messages'.",
    }
    neutral: ClassVar = {"mcp_servers": ([],)}
    params: ClassVar = {
        "prompt": "messages",
        "template_args": "thinking",
        "thinking_budget": "thinking.budget_tokens",
    }
    example: ClassVar = {"messages": [{"role": "user", "content": "Hello!"}]}

    model: Annotated[Label, Field(min_length=1)]
    messages: Annotated[list[InputMessage], FAIL_FAST, ITEM_LIMIT, Field(min_length=1)]
    system: SystemPrompt | None = None
    tools: AnthropicTools
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = None  # older name of output_config.format

    @model_validator(mode="after")
    def _check_tools(self) -> "CountMessageTokensRequest":
        check_input_schemas(self.tools)
        return self

    def param_of(self, part: ErrorPart) -> str:
        if part != "answer_form":
            return super().param_of(part)
        param, grammar = self.form()
        if grammar is None:
            return "tools"
        return param

    def unserved_tools(self) -> Sequence[str]:
        return unserved_tools(self.tools)

    def form(self) -> tuple[str, Grammar | None]:
        """Return the name of the field that sets the answer's format, and its grammar or None.

        Raises BadRequest if two fields ask for different formats.
        """
        param = "output_config.format"
        formats = {param: self.output_config.format, "output_format": self.output_format}
        forms = [
            (name, json_schema(form.schema_, param=name, must_fit=True))
            for name, form in formats.items()
            if form is not None
        ]
        return one_form(forms) if forms else (param, None)

    def calling(self) -> tuple[Sequence[Mapping[str, Any]], Calling | None]:
        choice = self.tool_choice
        parallel = choice is None or not choice.disable_parallel_tool_use
        return read_tools(self.tools, select(choice, parallel=parallel))

    @property
    def thoughts(self) -> Thoughts:
        # Clients that send no `thinking` take the first block for the text.
        if self.thinking is None or self.thinking.type == "disabled":
            return "none"
        if self.thinking.display == "omitted":
            return "signed"
        return "whole"

    @property
    def thinking_budget(self) -> int | None:
        if self.thinking is None or self.thinking.type != "enabled":
            return None
        return self.thinking.budget_tokens

    def template_args(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the chat template's arguments, with the model's `own` as defaults."""
        # Without `thinking`, the model only thinks if its own arguments say so.
        args = {"enable_thinking": False, **own}
        if self.thinking is not None:
            args["enable_thinking"] = self.thinking.type != "disabled"
        if args["enable_thinking"] and self.output_config.effort is not None:
            args["reasoning_effort"] = self.output_config.effort
        return args


class MessagesRequest(CountMessageTokensRequest):
    """A request to /v1/messages."""

    example: ClassVar = {**CountMessageTokensRequest.example, "max_tokens": 256}

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[StopTexts, Field(default_factory=tuple), AfterValidator(read_stops)]
    temperature: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    stream: bool = False

    @model_validator(mode="after")
    def _check_budget(self) -> "MessagesRequest":
        if (self.thinking_budget or 0) >= self.max_tokens:
            raise BadRequest(
                "'max_tokens' must be greater than 'thinking.budget_tokens'.",
                param="thinking.budget_tokens",
            )
        return self

    def sampling(self, defaults: Sampling) -> Sampling:
        return read_sampling(self, {"temperature", "top_p", "top_k"}, defaults)


def to_job(
    request: CountMessageTokensRequest,
    caller: Caller,
    defaults: Sampling,
    *,
    template_args: Mapping[str, Any],
    max_chars: int,
    budgets: Mapping[str, int] = NO_BUDGETS,
    images: ImageReader = REFUSING,
) -> GenerateJob:
    """Return the job of a request, with the model's defaults for fields that it leaves out."""
    turns = to_turns(request.system, request.messages, images)
    check_length(turns, max_chars, param="messages")
    check_length(request.tools, max_chars, param="tools")
    tools, calling = request.calling()
    param, grammar = request.form()
    continues = is_continuation(request.messages, images)
    if continues:
        require_free(grammar, param, calling)
    job = GenerateJob(
        caller=caller,
        messages=turns,
        sampling=defaults,
        tools=tools,
        calling=calling,
        template_args=request.template_args(template_args),
        grammar=grammar,
        continues=continues,
        thinking_budget=read_budget(request.thinking_budget, request.output_config.effort, budgets),
        images=images.decode(),
    )
    # A request to count tokens has no `max_tokens`, and its job never runs.
    if not isinstance(request, MessagesRequest):
        return job
    return replace(
        job,
        sampling=request.sampling(defaults),
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
    )


StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class TextBlock(TypedDict):
    """Text of the answer."""

    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    """The model's thinking."""

    type: Literal["thinking"]
    thinking: str
    signature: str  # base64 of the thinking's SHA-256, which is never verified


class DirectCaller(TypedDict):
    """The caller of a tool, which is always the model itself."""

    type: Literal["direct"]


class ToolUseBlock(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    caller: DirectCaller
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TypeAliasType("ContentBlock", TextBlock | ThinkingBlock | ToolUseBlock)


class AnthropicOutputTokensDetails(TypedDict):
    """The number of the answer's tokens that are thinking."""

    thinking_tokens: int


class MessageUsage(TypedDict):
    """The numbers of tokens read and written."""

    input_tokens: int  # neither read from the prefix cache nor newly kept in it
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: None
    inference_geo: None
    output_tokens: int
    output_tokens_details: AnthropicOutputTokensDetails
    server_tool_use: None
    service_tier: Literal["standard"]
    speed: Literal["standard"]


class AnthropicMessage(TypedDict):
    """An answer of the Messages API."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    container: None
    diagnostics: None
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None
    usage: MessageUsage
    gateway: NotRequired[SchemaVerdict]


class MessageTokensCount(TypedDict):
    """The length of a prompt, in tokens."""

    input_tokens: int


def usage_dict(usage: Usage) -> MessageUsage:
    cached = min(usage.cached_tokens, usage.prompt_tokens)
    # After a preemption, `kept_tokens` also counts tokens of the answer.
    kept_tokens = min(usage.kept_tokens, usage.prompt_tokens - cached)
    return {
        "input_tokens": usage.prompt_tokens - cached - kept_tokens,
        "cache_creation_input_tokens": kept_tokens,
        "cache_read_input_tokens": cached,
        "cache_creation": None,
        "inference_geo": None,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "server_tool_use": None,
        "service_tier": "standard",
        "speed": "standard",
    }


MOST_LISTED = 1000


class AnthropicModel(TypedDict):
    """A model, listed under one of its names."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None
    max_tokens: int | None
    capabilities: None
    line: None
    lifecycle: Literal["active"]
    deprecated_at: None
    retires_at: None


class AnthropicModels(TypedDict):
    """A page of the list of models."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_info(name: str, created: int, max_context: int | None) -> AnthropicModel:
    """Return a model's entry; `created` is in Unix seconds, `max_context` in tokens."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": max_context,
        "max_tokens": max_context,
        "capabilities": None,
        "line": None,
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
    }


def model_page(models: Sequence[AnthropicModel], query: Mapping[str, str]) -> AnthropicModels:
    """Return the page that `limit`, `after_id` and `before_id` in the query ask for.

    Raises BadRequest for a bad limit, an unknown id, or both ids.
    """
    limit, total = read_limit(query, MOST_LISTED), len(models)
    if "after_id" in query and "before_id" in query:
        raise BadRequest("Send 'after_id' or 'before_id', not both.", param="before_id")
    ids: list[Any] = [model["id"] for model in models]
    if "before_id" in query:
        end = find_place(ids, query, "before_id", "model")
        start = max(0, end - limit)
        has_more = start > 0
    else:
        start = 0
        if "after_id" in query:
            start = find_place(ids, query, "after_id", "model") + 1
        end = min(start + limit, total)
        has_more = end < total
    shown = ids[start:end] or [None]
    return {
        "data": list(models[start:end]),
        "has_more": has_more,
        "first_id": shown[0],
        "last_id": shown[-1],
    }


OVERLOADED = 529  # Anthropic's status, not in the HTTP standard
AnthropicErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "api_error",
    "overloaded_error",
]
_TYPES: dict[int, AnthropicErrorType] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
    OVERLOADED: "overloaded_error",
}
# This code tells the SDKs' tool runners to send whole conversations.
_CODES: dict[tuple[str | None, str | None], str] = {
    ("unsupported_parameter", "thread"): "thread_unsupported_request"
}


class AnthropicErrorCode(TypedDict):
    """The gateway's code for an error."""

    error_code: str


class AnthropicErrorDetails(TypedDict):
    """The type and the message of an error."""

    type: AnthropicErrorType
    message: str
    details: NotRequired[AnthropicErrorCode]


class AnthropicErrorBody(TypedDict):
    """An error in Anthropic's format."""

    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: str


def error_status(error: GatewayError | type[GatewayError]) -> int:
    """Return an error's status: 529 if the gateway is overloaded, else the gateway's own."""
    if isinstance(error, GatewayError):
        error = type(error)
    if issubclass(error, Overloaded | NoRoom):
        return OVERLOADED
    return int(error.status)


def error_body(error: GatewayError, request_id: str) -> AnthropicErrorBody:
    status = error_status(error)
    is_ours = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = _TYPES.get(status, "api_error" if is_ours else "invalid_request_error")
    details: AnthropicErrorDetails = {"type": kind, "message": _message(error)}
    code = _CODES.get((error.code, error.param)) or error.code
    if code is not None:
        details["details"] = {"error_code": code}
    return {"type": "error", "error": details, "request_id": request_id}


def _message(error: GatewayError) -> str:
    # Agents recognize Anthropic's sentence, and then shorten the conversation.
    if isinstance(error, ContextLengthExceeded):
        return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
    return error.message
