"""Chat messages and tools: OpenAI's forms → those that chat templates read."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import orjson
from pydantic import Discriminator, Field, Tag

from gateway import jobs
from gateway.errors import BadRequest
from gateway.wire.bounds import FAIL_FAST, ITEM_LIMIT, Label, Name, Schema, parse
from gateway.wire.validation import Part, require

Role = Literal["developer", "system", "user", "assistant", "tool", "function"]


class ContentPart(Part):
    """A piece of a message's content. Only text is served."""

    harmless = frozenset({"annotations", "cache_control", "logprobs", "prompt_cache_breakpoint"})

    # By the type of a part, the field with its text.
    fields: ClassVar[Mapping[str, str]] = {"text": "text", "refusal": "refusal"}

    type: Label = Field(json_schema_extra={"enum": ["text", "refusal"]})
    text: str | None = None
    refusal: str | None = None


class Function(Part):
    """A function's name and its arguments, which are JSON inside a string."""

    name: Label
    arguments: str = ""


class ToolCall(Part):
    """A call that the assistant made in an earlier turn."""

    harmless = frozenset({"index"})

    id: Label | None = None
    type: Label = "function"
    function: Function


class Message(Part):
    """One turn of a conversation, as a client sends it: an answer's message, say, as it came."""

    harmless = frozenset({"annotations", "reasoning", "reasoning_content", "refusal"})

    role: Role
    content: str | Annotated[list[ContentPart], FAIL_FAST, ITEM_LIMIT] | None = None
    name: Label | None = None
    tool_calls: Annotated[list[ToolCall], FAIL_FAST, ITEM_LIMIT] | None = None
    tool_call_id: Label | None = None
    prefix: bool | None = None


def is_continuation(messages: Sequence[Message], *, requested: bool) -> bool:
    """Return True if the answer continues the last message, as `requested` or by its `prefix`,
    which is Mistral's and DeepSeek's field.

    Raises BadRequest if that message cannot be continued.
    """
    *earlier, last = messages
    for i, message in enumerate(earlier):
        if message.prefix:
            place = f"messages[{i}].prefix"
            raise BadRequest(
                f"Invalid '{place}': only the last message can begin the answer.", param=place
            )
    if not (requested or last.prefix):
        return False
    place = f"messages[{len(earlier)}]"
    if last.role != "assistant" or last.tool_calls or not _text(last.content, place):
        raise BadRequest(
            f"Invalid '{place}': an answer is continued from an assistant's message that has text "
            "and no 'tool_calls'.",
            param=place,
        )
    return True


def to_template(messages: list[Message]) -> list[dict[str, Any]]:
    """Return the turns as templates expect them.

    `developer` becomes `system`; all system turns are joined into the first turn, and consecutive
    user turns into one: many templates refuse anything else. The result is never empty. Raises
    BadRequest for content that is not text.
    """
    turns = [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]
    system = "\n\n".join(turn["content"] for turn in turns if turn["role"] == "system")
    template_turns: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    rest_turns = (turn for turn in turns if turn["role"] != "system")
    for role, turns_of_role in groupby(rest_turns, key=itemgetter("role")):
        if role != "user":
            template_turns += turns_of_role
            continue
        first, *rest = turns_of_role
        if rest:
            first["content"] = "\n\n".join(turn["content"] for turn in (first, *rest))
        template_turns.append(first)
    return template_turns or [{"role": "system", "content": ""}]


def _turn(message: Message, place: str) -> dict[str, Any]:
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    if message.role == "user":
        require(message.content, f"{place}.content")
    turn: dict[str, Any] = {"role": role, "content": _text(message.content, place)}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": _template_function(call.function, place),
            }
            for call in message.tool_calls
        ]
    return turn


def _text(content: str | list[ContentPart] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return join_texts(content, f"{place}.content")


def join_texts(parts: Sequence[ContentPart], place: str) -> str:
    """Return the text of all parts. Raises BadRequest for a part that is not text."""
    texts = []
    for i, part in enumerate(parts):
        if part.type not in part.fields:
            raise BadRequest(
                f"Invalid '{place}': a part of type '{part.type}' is not served; "
                "this gateway reads text.",
                param=place,
            )
        field = part.fields[part.type]
        value = require(getattr(part, field), f"{place}[{i}].{field}")
        texts.append(value if isinstance(value, str) else orjson.dumps(value).decode())
    return "".join(texts)


def _template_function(function: Function, place: str) -> dict[str, Any]:
    """Return a call with its arguments parsed: templates write them as JSON themselves."""
    try:
        arguments = parse((function.arguments or "{}").encode())
    except ValueError:
        raise BadRequest(
            f"Invalid '{place}.tool_calls': the arguments of '{function.name}' are not JSON.",
            param=f"{place}.tool_calls",
        ) from None
    return {"name": function.name, "arguments": arguments}


class FunctionParam(Part):
    """A function as the client describes it."""

    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class ToolParam(Part):
    """A function among the tools."""

    type: Literal["function"] = "function"
    function: FunctionParam


class OtherTool(Part):
    """A tool that is not served. It is skipped if there are functions, and a header names it."""

    @property
    def model_extra(self) -> None:
        """Return None: its fields are not listed as unknown."""

    type: Annotated[Label, Field(json_schema_extra={"not": {"enum": ["function", "namespace"]}})]


def tool_tag(tool: object) -> str:
    """Return the tag of a tool. One whose type is missing or no string counts as a function."""
    kind = tool.get("type", "function") if isinstance(tool, dict) else "function"
    return OTHER if isinstance(kind, str) and kind != "function" else FUNCTION


T = TypeVar("T")
# The tags are no identifiers, so no field's path has them.
FUNCTION, OTHER = "function tool", "other tool"
AnyTool = Annotated[
    Annotated[T, Tag(FUNCTION)] | Annotated[OtherTool, Tag(OTHER)], Discriminator(tool_tag)
]


class FunctionName(Part):
    """A function, chosen by name."""

    name: Label


class NamedTool(Part):
    """A tool, chosen by its function's name."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Part):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], FAIL_FAST, Field(min_length=1, max_length=128)]


class AllowedChoice(Part):
    """`tool_choice` naming several."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedChoice


def unserved_tools(tools: Sequence[object]) -> list[str]:
    """Return the tools that are not served, each as `tools.` and its type."""
    return [f"tools.{tool.type}" for tool in tools if isinstance(tool, OtherTool)]


def read_tools(
    tools: Sequence[ToolParam | OtherTool], choice: ToolChoice | None, *, parallel: bool
) -> tuple[Sequence[Mapping[str, Any]], jobs.Calling | None]:
    """Return the tools as templates read them, and which of them may or must be called.

    Raises BadRequest for a choice that names no tool, for two tools of one name, and if no tool is
    a function.
    """
    functions = [tool for tool in tools if isinstance(tool, ToolParam)]
    if tools and not functions:
        tool_types = ", ".join(sorted({f"'{tool.type[:64]}'" for tool in tools}))
        raise BadRequest(
            f"Invalid 'tools[0].type': functions are the only tools served, not {tool_types}.",
            param="tools[0].type",
            code="unsupported_value",
        )
    names = [tool.function.name for tool in functions]
    if duplicates := [name for name, count in Counter(names).items() if count > 1]:
        raise BadRequest(f"Two tools are named '{min(duplicates)}'.", param="tools")
    allowed_names, forced = _select_tools(names, choice)
    if not allowed_names:
        return (), None
    allowed_tools = [tool for tool in functions if tool.function.name in allowed_names]
    callable_functions = [
        jobs.Function(
            tool.function.name,
            tool.function.parameters or {"type": "object", "properties": {}},
            strict=bool(tool.function.strict),
        )
        for tool in allowed_tools
    ]
    calling = jobs.Calling(
        functions=callable_functions,
        forced=forced,
        parallel=parallel and not isinstance(choice, NamedTool),
    )
    return [_template_tool(tool) for tool in allowed_tools], calling


def _select_tools(names: Sequence[str], choice: ToolChoice | None) -> tuple[Sequence[str], bool]:
    """Return the names that may be called, and whether one of them must be."""
    match choice:
        case None | "auto":
            return names, False
        case "none":
            return (), False
        case "required":
            chosen_names, forced = list(names), True
        case NamedTool():
            chosen_names, forced = [choice.function.name], True
        case AllowedChoice():
            chosen_names = [tool.function.name for tool in choice.allowed_tools.tools]
            forced = choice.allowed_tools.mode == "required"
    if not chosen_names:
        raise BadRequest("'tool_choice' asks for a call, but there are no 'tools'.", param="tools")
    if unknown := [name for name in chosen_names if name not in names]:
        raise BadRequest(
            f"Invalid 'tool_choice': there is no tool named '{unknown[0]}'.", param="tool_choice"
        )
    return chosen_names, forced


def _template_tool(tool: ToolParam) -> dict[str, Any]:
    """Return a tool in the form that models were trained on."""
    function = tool.function.model_dump(exclude_none=True, exclude={"strict"})
    function.setdefault("parameters", {"type": "object", "properties": {}})
    return {"type": "function", "function": function}
