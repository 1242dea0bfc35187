"""POST /v1/responses: request → GenerateJob, and what the answer says of its request."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, model_validator

from gateway.errors import BadRequest
from gateway.jobs import Caller, GenerateJob, Grammar, Sampling
from gateway.wire.bounds import Schema
from gateway.wire.chat import Effort
from gateway.wire.formats import ANY_OBJECT, Name, json_schema
from gateway.wire.messages import to_template
from gateway.wire.reading import Fields, Part
from gateway.wire.response_items import Items, to_messages
from gateway.wire.sampling import SampledRequest
from gateway.wire.tools import AllowedChoice, AllowedTools, Choice, NamedTool, ToolParam, read_tools
from gateway.wire.tools import FunctionName as Meant
from gateway.wire.tools import FunctionParam as Described

LOGPROBS = "message.output_text.logprobs"

_STATELESS = "This gateway keeps no responses: send the whole conversation as 'input'."
_MOVED = "In the Responses API it is '{}'."
FIELDS = Fields(
    harmless=frozenset(
        {
            "access_programs", "context_management", "image", "max_tool_calls", "prompt_cache_key",
            "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "store",
            "stream_options", "user",
        }
    ),
    refused={
        "previous_response_id": _STATELESS,
        "conversation": _STATELESS,
        "background": "This gateway keeps no responses, so there is none to come back for.",
        "prompt": "This gateway keeps no prompt templates.",
        "moderation": "This gateway does not moderate.",
        "messages": _MOVED.format("input"),
        "max_tokens": _MOVED.format("max_output_tokens"),
        "max_completion_tokens": _MOVED.format("max_output_tokens"),
        "response_format": _MOVED.format("text.format"),
        "structured_outputs": _MOVED.format("text.format"),
        "guided_json": _MOVED.format("text.format"),
        "guided_regex": _MOVED.format("text.format"),
        "guided_choice": _MOVED.format("text.format"),
        "guided_grammar": _MOVED.format("text.format"),
        "reasoning_effort": _MOVED.format("reasoning.effort"),
        "functions": _MOVED.format("tools"),
        "function_call": _MOVED.format("tool_choice"),
        "logprobs": f"Say 'include': ['{LOGPROBS}'] instead.",
        "n": "A response is one answer.",
    },
    neutral={
        "background": (False,),
        "logprobs": (False,),
        "n": (1,),
        "response_format": ({"type": "text"},),
    },
)  # fmt: skip


class TextFormat(Part):
    """OpenAI's flat form of a format."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None
    description: str | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> "TextFormat":
        if self.type == "json_schema" and (self.schema_ is None or self.name is None):
            raise ValueError("type 'json_schema' needs a 'name' and a 'schema'")
        return self

    def grammar(self) -> Grammar | None:
        """Give what the answer must match, if anything."""
        if self.type == "json_schema":
            return json_schema(self.schema_, param="text.format.schema")
        return ANY_OBJECT if self.type == "json_object" else None


class TextConfig(Part):
    """What the text is to look like."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Part):
    """How much the model may think. Summaries are not written."""

    effort: Effort | None = None
    summary: str | None = None


class FunctionTool(Part):
    """A function in OpenAI's flat form; other tools are not served."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None

    def nested(self) -> ToolParam:
        """Give it as chat completions have it."""
        return ToolParam(
            function=Described(
                name=self.name,
                description=self.description,
                parameters=self.parameters,
                strict=self.strict,
            )
        )

    def told(self) -> dict[str, Any]:
        """Give it as the answer repeats it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": bool(self.strict),
        }


_NAMED = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
    "required": ["type", "name"],
}
_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        _NAMED,
        {
            "type": "object",
            "properties": {
                "type": {"const": "allowed_tools"},
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": _NAMED, "minItems": 1},
            },
            "required": ["type", "mode", "tools"],
        },
    ]
}


class ResponsesRequest(SampledRequest):
    """What OpenAI's endpoint takes, without state and with functions as the only tools."""

    model: Annotated[str, Field(min_length=1)]
    input: Items
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextConfig = TextConfig()
    tools: Annotated[list[FunctionTool], Field(default_factory=list, max_length=128)]
    tool_choice: Annotated[Any, WithJsonSchema(_CHOICE)] = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    include: Annotated[list[str], Field(default_factory=list)]
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: Annotated[dict[str, Any], Field(default_factory=dict)]
    service_tier: str | None = None
    stream: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]

    @property
    def logprobs(self) -> int | None:
        """Count the likeliest tokens to tell beside each; None for no logprobs at all."""
        return self.top_logprobs if LOGPROBS in self.include or self.top_logprobs else None

    def template_args(self) -> dict[str, Any]:
        """Give what the request says of thinking, in the words of chat templates."""
        args: dict[str, Any] = {}
        effort = self.reasoning.effort
        is_one_token = self.max_output_tokens == 1
        if effort in ("none", "minimal") or (is_one_token and self.logprobs is not None):
            args["enable_thinking"] = False
        elif effort is not None:
            args |= {"enable_thinking": True, "reasoning_effort": effort}
        return {**args, **self.chat_template_kwargs}


def to_job(
    request: ResponsesRequest,
    caller: Caller,
    defaults: Sampling,
    *,
    max_tokens: int | None,
    template_args: Mapping[str, Any],
    max_chars: int,
) -> GenerateJob:
    """Translate; what the request leaves out comes from the model's defaults."""
    messages = to_template(to_messages(request.instructions, request.input))
    if sum(len(message["content"]) for message in messages) > max_chars:
        raise BadRequest(f"The input is longer than {max_chars} characters.", param="input")
    tools, calling = read_tools(
        [tool.nested() for tool in request.tools],
        _choice(request.tool_choice),
        parallel=request.parallel_tool_calls,
    )
    return GenerateJob(
        caller=caller,
        messages=messages,
        sampling=request.sampling(defaults),
        max_tokens=request.max_output_tokens or max_tokens,
        stop=request.stop,
        tools=tools,
        calling=calling,
        template_args={
            **template_args,
            **request.template_args(),
        },
        grammar=request.text.format.grammar() if request.text.format is not None else None,
        logprobs=request.logprobs,
    )


def _choice(given: Any) -> Choice | None:
    """Read OpenAI's flat form of a choice. Raises BadRequest for tools that are not functions."""
    match given:
        case "none" | "auto" | "required":
            return given  # type: ignore[no-any-return]
        case {"type": "function", "name": str(name)}:
            return _named(name)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*tools]}:
            names = [_choice(tool) for tool in tools]
            named = [name for name in names if isinstance(name, NamedTool)]
            if named and len(named) == len(names):
                allowed = AllowedTools(mode=mode, tools=named)
                return AllowedChoice(type="allowed_tools", allowed_tools=allowed)
    raise BadRequest(
        "Invalid 'tool_choice': it should be 'none', 'auto', 'required', a function's name as "
        "{'type': 'function', 'name': …}, or 'allowed_tools' of such.",
        param="tool_choice",
        code="invalid_value",
    )


def _named(name: str) -> NamedTool:
    return NamedTool(type="function", function=Meant(name=name))


def described(
    request: ResponsesRequest, job: GenerateJob, *, response_id: str, created: int
) -> dict[str, Any]:
    """Give all of the answer that is known before its first token."""
    text_format = request.text.format or TextFormat(type="text")
    return {
        "id": response_id,
        "object": "response",
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
        "previous_response_id": None,
        "reasoning": {"effort": request.reasoning.effort, "summary": None},
        "service_tier": job.caller.tier.value,
        "store": False,
        "temperature": job.sampling.temperature,
        "text": {
            "format": text_format.model_dump(by_alias=True, exclude_none=True),
            "verbosity": request.text.verbosity,
        },
        "tool_choice": request.tool_choice,
        "tools": [tool.told() for tool in request.tools],
        "top_logprobs": request.top_logprobs,
        "top_p": job.sampling.top_p,
        "truncation": request.truncation,
        "usage": None,
        "user": (request.model_extra or {}).get("user"),
    }
