"""The requests and answers of POST /v1/chat/completions."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired, cast

import orjson
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from gateway.clock import Timings
from gateway.errors import BadRequest
from gateway.errors import Part as ErrorPart
from gateway.jobs import Caller
from gateway.jobs.chat import CallDelta, Calling, Delta, GenerateJob, Sampling, Usage
from gateway.jobs.chat import FinishReason as Finish
from gateway.wire.answers import Answer, ChunkWriter, Event
from gateway.wire.bounds import FAIL_FAST, ITEM_LIMIT, Label
from gateway.wire.generation import (
    NO_BUDGETS,
    THINKING_BUDGET,
    ChoiceLogprobs,
    CompletionUsage,
    Effort,
    Heading,
    MaxTokens,
    SchemaVerdict,
    ServiceTier,
    StreamOptions,
    StructuredRequest,
    ThinkingTokenBudget,
    logprobs_dict,
    read_budget,
    require_free,
    schema_from_prompt,
    thinking_args,
    usage_dict,
)
from gateway.wire.images import REFUSING, ImageReader
from gateway.wire.messages import Message, is_continuation, to_template
from gateway.wire.tools import (
    MAX_TOOLS,
    ChatTools,
    FunctionName,
    FunctionParam,
    OtherTool,
    Selection,
    ToolChoice,
    ToolParam,
    read_tools,
    select,
    unserved_tools,
)
from gateway.wire.validation import check_length

_TEXT = "This gateway writes text."


class ChatRequest(StructuredRequest):
    """A request for a chat completion, with fields of OpenAI and vLLM."""

    harmless = frozenset(
        {
            "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
            "safety_identifier", "store", "user", "verbosity", "prediction",
        }
    )  # fmt: skip
    refused: ClassVar = {
        "audio": _TEXT,
        "modalities": _TEXT,
        "web_search_options": "This gateway has no web search.",
        "moderation": "This gateway does not moderate.",
    }
    neutral: ClassVar = {"modalities": (["text"], [])}
    params: ClassVar = {
        "prompt": "messages",
        "template_args": "chat_template_kwargs",
        "thinking_budget": THINKING_BUDGET,
    }
    example: ClassVar = {"messages": [{"role": "user", "content": "Hello!"}]}

    model: Annotated[Label, Field(min_length=1)]
    messages: Annotated[list[Message], FAIL_FAST, ITEM_LIMIT, Field(min_length=1)]
    max_tokens: MaxTokens = None  # older name of max_completion_tokens
    max_completion_tokens: MaxTokens = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    service_tier: ServiceTier = "auto"
    tools: ChatTools
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    # OpenAI's older form of `tools`; the answer then has `function_call`, not `tool_calls`.
    functions: Annotated[
        list[FunctionParam], FAIL_FAST, Field(default_factory=list, max_length=MAX_TOOLS)
    ]
    function_call: Literal["none", "auto"] | FunctionName | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: ThinkingTokenBudget = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]
    # vLLM's field: the answer continues the last message.
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> "ChatRequest":
        if self.continue_final_message and self.add_generation_prompt:
            raise BadRequest(
                "'continue_final_message' needs 'add_generation_prompt' to be false.",
                param="add_generation_prompt",
            )
        if self.add_generation_prompt is False and not self.continues:
            raise BadRequest(
                "'add_generation_prompt' can only be false beside 'continue_final_message'.",
                param="add_generation_prompt",
            )
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        self.selection()  # raises if old and new fields are mixed
        return self

    @property
    def continues(self) -> bool:
        return is_continuation(self.messages, requested=self.continue_final_message)

    def param_of(self, part: ErrorPart) -> str:
        if part != "answer_form":
            return super().param_of(part)
        param, grammar = self.form()
        return "tools" if grammar is None and self.requested_tools() else param

    def unserved_tools(self) -> Sequence[str]:
        return unserved_tools(self.tools)

    @property
    def is_legacy(self) -> bool:
        """Return True if the answer writes a call as `function_call`."""
        return bool(self.functions)

    def requested_tools(self) -> Sequence[FunctionParam | OtherTool]:
        if self.functions:
            return self.functions
        return [tool.function if isinstance(tool, ToolParam) else tool for tool in self.tools]

    def selection(self) -> Selection:
        """Return which tools may be called. Raises BadRequest if old and new fields are mixed."""
        if not self.functions:
            if isinstance(self.function_call, FunctionName):
                raise BadRequest("'function_call' needs 'functions'.", param="function_call")
            return select(self.tool_choice, parallel=self.parallel_tool_calls)
        if self.tools or self.tool_choice is not None:
            raise BadRequest("Send 'tools' or 'functions', not both.", param="functions")
        return select(self.function_call, parallel=False)

    def calling(self) -> tuple[Sequence[Mapping[str, Any]], Calling | None]:
        return read_tools(self.requested_tools(), self.selection())

    @property
    def thinking_budget(self) -> int | None:
        return self.thinking_token_budget

    def template_args(self) -> dict[str, Any]:
        """Return the chat template's arguments; `chat_template_kwargs` takes precedence."""
        is_one_token = (self.max_completion_tokens or self.max_tokens) == 1
        args = thinking_args(self.reasoning_effort, is_scored=self.logprobs and is_one_token)
        return {**args, **self.chat_template_kwargs}


def to_job(
    request: ChatRequest,
    caller: Caller,
    defaults: Sampling,
    *,
    max_tokens: int | None,
    template_args: Mapping[str, Any],
    max_chars: int,
    schema_in_prompt: bool = False,
    budgets: Mapping[str, int] = NO_BUDGETS,
    images: ImageReader = REFUSING,
) -> GenerateJob:
    """Return the job of a request, with the model's defaults for fields that it leaves out."""
    messages = to_template(request.messages, images)
    check_length(messages, max_chars, param="messages")
    check_length(request.requested_tools(), max_chars, param="tools")
    tools, calling = request.calling()
    form_param, grammar = request.form()
    if request.continues:
        require_free(grammar, form_param, calling)
    if schema_in_prompt:
        grammar = schema_from_prompt(grammar, messages[-1]["content"])
    return GenerateJob(
        caller=caller,
        messages=messages,
        sampling=request.sampling(defaults),
        max_tokens=request.max_completion_tokens or request.max_tokens or max_tokens,
        stop=request.stop,
        n=request.n,
        tools=tools,
        calling=calling,
        template_args={**template_args, **request.template_args()},
        grammar=grammar,
        continues=request.continues,
        thinking_budget=read_budget(request.thinking_budget, request.reasoning_effort, budgets),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        images=images.decode(),
    )


FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class FunctionCall(TypedDict):
    """A function's name, and its arguments as JSON inside a string."""

    name: str
    arguments: str


class FunctionCallDelta(TypedDict):
    """A piece of a function call."""

    name: NotRequired[str]  # in the first piece only
    arguments: str


class ChatToolCall(TypedDict):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatToolCallDelta(TypedDict):
    """A piece of a call."""

    index: int
    id: NotRequired[str]  # in the first piece only
    type: NotRequired[Literal["function"]]
    function: FunctionCallDelta


class ChatMessage(TypedDict):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    function_call: NotRequired[FunctionCall]
    tool_calls: NotRequired[list[ChatToolCall]]


class ChoiceDelta(TypedDict, total=False):
    """The new part of a message."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str
    function_call: FunctionCallDelta
    tool_calls: list[ChatToolCallDelta]


class ChatChoice(TypedDict):
    """One answer to a request."""

    index: int
    message: ChatMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason


class ChatChunkChoice(TypedDict):
    """The new part of one answer."""

    index: int
    delta: ChoiceDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletion(Heading):
    """A whole chat completion."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: CompletionUsage


class ChatCompletionChunk(Heading):
    """One event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[CompletionUsage]
    timings: NotRequired[Mapping[str, float]]
    gateway: NotRequired[SchemaVerdict]


class ChatCompletionWriter(ChunkWriter):
    """Writes a chat completion or its chunks."""

    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ChatRequest, heading: Heading, timings: Timings) -> None:
        super().__init__(heading, timings, has_usage=request.stream_options.include_usage)
        self._choice_count = request.n
        self._has_logprobs = request.logprobs
        self._is_legacy = request.is_legacy

    def begin(self, usage: Usage) -> Sequence[Event]:
        first: ChoiceDelta = {"role": "assistant", "content": ""}
        return [self._chunk([_chunk_choice(i, first)]) for i in range(self._choice_count)]

    def add(self, delta: Delta, verdict: SchemaVerdict | None = None) -> Sequence[Event]:
        logprobs = logprobs_dict(delta.logprobs) if delta.logprobs else None
        index = delta.index
        parts = []
        if delta.reasoning:
            parts.append(_chunk_choice(index, {"reasoning_content": delta.reasoning}))
        if delta.text or logprobs is not None:
            parts.append(_chunk_choice(index, {"content": delta.text}, logprobs))
        if delta.call is not None:
            parts += [_chunk_choice(index, part) for part in self._call(delta.call)]
        chunks = [self._chunk([part]) for part in parts]
        if delta.finish_reason is not None:
            reason = _finish_reason(delta.finish_reason, is_legacy=self._is_legacy)
            end = self._chunk([_chunk_choice(index, {}, finish_reason=reason)])
            if verdict is not None:
                end["gateway"] = verdict
            chunks.append(end)
        return chunks

    def whole(self, answer: Answer) -> ChatCompletion:
        # Each choice is dumped by itself, since orjson holds the GIL during a dump.
        choices_json = [
            orjson.Fragment(orjson.dumps(self._choice(index, deltas)))
            for index, deltas in enumerate(answer.choices)
        ]
        return {
            **self._heading,
            "object": "chat.completion",
            "choices": cast(list[ChatChoice], choices_json),
            "usage": usage_dict(answer.usage),
        }

    def _choice(self, index: int, deltas: Sequence[Delta]) -> ChatChoice:
        reason = deltas[-1].finish_reason
        assert reason is not None
        logprobs = [token for delta in deltas for token in delta.logprobs]
        return {
            "index": index,
            "message": self._message(deltas),
            "logprobs": logprobs_dict(logprobs) if self._has_logprobs else None,
            "finish_reason": _finish_reason(reason, is_legacy=self._is_legacy),
        }

    def _message(self, deltas: Sequence[Delta]) -> ChatMessage:
        text = "".join(delta.text for delta in deltas)
        message: ChatMessage = {"role": "assistant", "content": text, "refusal": None}
        reasoning = "".join(delta.reasoning for delta in deltas)
        if reasoning:
            message["reasoning_content"] = reasoning
        calls = _calls(deltas)
        if calls:
            message["content"] = text or None
            if self._is_legacy:
                message["function_call"] = calls[0]["function"]
            else:
                message["tool_calls"] = calls
        return message

    def _call(self, call: CallDelta) -> list[ChoiceDelta]:
        parts: list[ChatToolCallDelta] = []
        if call.name is not None:
            assert call.id is not None
            function: FunctionCallDelta = {"name": call.name, "arguments": ""}
            parts.append(
                {"index": call.index, "id": call.id, "type": "function", "function": function}
            )
        if call.arguments:
            parts.append({"index": call.index, "function": {"arguments": call.arguments}})
        if self._is_legacy:
            return [{"function_call": part["function"]} for part in parts]
        return [{"tool_calls": [part]} for part in parts]


def _chunk_choice(
    index: int,
    delta: ChoiceDelta,
    logprobs: ChoiceLogprobs | None = None,
    finish_reason: FinishReason | None = None,
) -> ChatChunkChoice:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _calls(deltas: Sequence[Delta]) -> list[ChatToolCall]:
    pieces: dict[int, list[CallDelta]] = {}
    for delta in deltas:
        if delta.call is not None:
            pieces.setdefault(delta.call.index, []).append(delta.call)
    calls: list[ChatToolCall] = []
    for call in pieces.values():
        call_id = call[0].id
        assert call_id is not None
        function: FunctionCall = {
            "name": "".join(piece.name or "" for piece in call),
            "arguments": "".join(piece.arguments for piece in call),
        }
        calls.append({"id": call_id, "type": "function", "function": function})
    return calls


def _finish_reason(reason: Finish, *, is_legacy: bool) -> FinishReason:
    return "function_call" if is_legacy and reason == "tool_calls" else reason
