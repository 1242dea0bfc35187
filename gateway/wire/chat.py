"""POST /v1/chat/completions: request → GenerateJob."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from gateway.errors import BadRequest
from gateway.jobs import Caller, Calling, GenerateJob, Sampling
from gateway.wire.bounds import FAST, FEW, Label
from gateway.wire.formats import FormedRequest, held_to_prompt
from gateway.wire.messages import Message, continued, to_template
from gateway.wire.reading import Part, check_length
from gateway.wire.sampling import MaxTokens, ServiceTier
from gateway.wire.tools import (
    AnyTool,
    Choice,
    FunctionName,
    FunctionParam,
    NamedTool,
    ToolParam,
    read_tools,
    skipped,
)

_TEXT = "This gateway writes text."


class StreamOptions(Part):
    """What the stream says beside its text."""

    harmless = frozenset({"include_obfuscation"})

    include_usage: bool = False


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(FormedRequest):
    """What OpenAI's endpoint takes, with vLLM's structured fields besides."""

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
    example: ClassVar = {"messages": [{"role": "user", "content": "Hello!"}]}

    model: Annotated[Label, Field(min_length=1)]
    messages: Annotated[list[Message], FAST, FEW, Field(min_length=1)]
    max_tokens: MaxTokens = None
    max_completion_tokens: MaxTokens = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    service_tier: ServiceTier = "auto"
    tools: Annotated[list[AnyTool[ToolParam]], FAST, Field(default_factory=list, max_length=128)]
    tool_choice: Choice | None = None
    parallel_tool_calls: bool = True
    functions: Annotated[list[FunctionParam], FAST, Field(default_factory=list, max_length=128)]
    function_call: Literal["none", "auto"] | FunctionName | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _an_answer_is_begun_or_continued(self) -> "ChatRequest":
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
        return self

    @property
    def continues(self) -> bool:
        """Return True if the last message is the beginning of the answer."""
        return continued(self.messages, asked=self.continue_final_message)

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        return self

    @model_validator(mode="after")
    def _calls_have_one_name(self) -> "ChatRequest":
        if self.functions and (self.tools or self.tool_choice is not None):
            raise BadRequest("Send 'tools' or 'functions', not both.", param="functions")
        if isinstance(self.function_call, FunctionName) and not self.functions:
            raise BadRequest("'function_call' needs 'functions'.", param="function_call")
        return self

    def skipped(self) -> Sequence[str]:
        """Name the tools that are not served."""
        return skipped(self.tools)

    @property
    def is_legacy(self) -> bool:
        """Tell whether calls are asked for, and told, under their older name."""
        return bool(self.functions)

    def calling(self) -> tuple[Sequence[Mapping[str, Any]], Calling | None]:
        """Give the tools as the template reads them, and what may be called."""
        if not self.is_legacy:
            return read_tools(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)
        choice: Choice | None = None
        if isinstance(self.function_call, FunctionName):
            choice = NamedTool(type="function", function=self.function_call)
        elif self.function_call is not None:
            choice = self.function_call
        tools = [ToolParam(function=function) for function in self.functions]
        return read_tools(tools, choice, parallel=False)

    def template_args(self) -> dict[str, Any]:
        """Give what the request says of thinking, in the words of chat templates."""
        args: dict[str, Any] = {}
        is_one_token = (self.max_completion_tokens or self.max_tokens) == 1
        if self.reasoning_effort in ("none", "minimal") or (self.logprobs and is_one_token):
            args["enable_thinking"] = False
        elif self.reasoning_effort is not None:
            args |= {"enable_thinking": True, "reasoning_effort": self.reasoning_effort}
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
) -> GenerateJob:
    """Translate; what the request leaves out comes from the model's defaults."""
    messages = to_template(request.messages)
    check_length(messages, max_chars, param="messages")
    check_length(request.tools or request.functions, max_chars, param="tools")
    tools, calling = request.calling()
    grammar_param, grammar = request.form()
    if request.continues and (grammar is not None or (calling is not None and calling.forced)):
        raise BadRequest(
            "An answer that is continued can't be held to a form, nor to a call.",
            param="tool_choice" if grammar is None else grammar_param,
        )
    if schema_in_prompt:
        grammar = held_to_prompt(grammar, messages[-1]["content"])
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
        grammar_param=grammar_param,
        continues=request.continues,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
