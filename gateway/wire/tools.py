"""Functions the model may call: OpenAI's `tools` and `tool_choice`, and their older names."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.errors import BadRequest
from gateway.jobs import Calling, Function
from gateway.wire.bounds import Schema
from gateway.wire.formats import Name
from gateway.wire.reading import Part


class FunctionParam(Part):
    """A function as the client describes it."""

    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class ToolParam(Part):
    """A tool; only functions are served."""

    type: Literal["function"] = "function"
    function: FunctionParam


class FunctionName(Part):
    """A function, meant by its name."""

    name: str


class NamedTool(Part):
    """A tool, meant by its function's name."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Part):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedChoice(Part):
    """`tool_choice` naming several."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Choice = Literal["none", "auto", "required"] | NamedTool | AllowedChoice


def read_tools(
    tools: Sequence[ToolParam], choice: Choice | None, *, parallel: bool
) -> tuple[Sequence[Mapping[str, Any]], Calling | None]:
    """Give what the template is shown of the tools, and which may or must be called.

    Raises BadRequest for a choice that names no tool, and for two tools of one name.
    """
    names = [tool.function.name for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise BadRequest(f"Two tools are named '{min(twice)}'.", param="tools")
    allowed, forced = _meant(names, choice)
    if not allowed:
        return (), None
    functions = [
        Function(
            tool.function.name,
            tool.function.parameters or {"type": "object", "properties": {}},
            strict=bool(tool.function.strict),
        )
        for tool in tools
        if tool.function.name in allowed
    ]
    one = isinstance(choice, NamedTool)
    calling = Calling(functions=functions, forced=forced, parallel=parallel and not one)
    return [_shown(tool) for tool in tools if tool.function.name in allowed], calling


def _meant(names: Sequence[str], choice: Choice | None) -> tuple[Sequence[str], bool]:
    """Give the names that may be called, and whether one of them must be."""
    match choice:
        case None | "auto":
            return names, False
        case "none":
            return (), False
        case "required":
            wanted, forced = list(names), True
        case NamedTool():
            wanted, forced = [choice.function.name], True
        case AllowedChoice():
            wanted = [tool.function.name for tool in choice.allowed_tools.tools]
            forced = choice.allowed_tools.mode == "required"
    if not wanted:
        raise BadRequest("'tool_choice' asks for a call, but there are no 'tools'.", param="tools")
    if unknown := [name for name in wanted if name not in names]:
        raise BadRequest(
            f"Invalid 'tool_choice': there is no tool named '{unknown[0]}'.", param="tool_choice"
        )
    return wanted, forced


def _shown(tool: ToolParam) -> dict[str, Any]:
    """Give a tool in the form that chat templates were trained on."""
    function = tool.function.model_dump(exclude_none=True, exclude={"strict"})
    function.setdefault("parameters", {"type": "object", "properties": {}})
    return {"type": "function", "function": function}
