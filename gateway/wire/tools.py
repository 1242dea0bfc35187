"""Functions the model may call: OpenAI's `tools` and `tool_choice`, and their older names."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Discriminator, Field, Tag

from gateway.errors import BadRequest
from gateway.jobs import Calling, Function
from gateway.wire.bounds import FAST, Label, Schema
from gateway.wire.formats import Name
from gateway.wire.reading import Part


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
    """A tool that is not served: beside a function it is skipped, and the answer says so."""

    @property
    def model_extra(self) -> None:
        """Return nothing: what it holds is skipped with it."""

    type: Annotated[Label, Field(json_schema_extra={"not": {"enum": ["function", "namespace"]}})]


def kind_of(given: object) -> str:
    """Return the tag of a tool's type. A tool without a type, or an odd one, is a function."""
    kind = given.get("type", "function") if isinstance(given, dict) else "function"
    return OTHER if isinstance(kind, str) and kind != "function" else FUNCTION


T = TypeVar("T")
# The tags are no identifiers: nothing in a request is called so.
FUNCTION, OTHER = "function tool", "other tool"
AnyTool = Annotated[
    Annotated[T, Tag(FUNCTION)] | Annotated[OtherTool, Tag(OTHER)], Discriminator(kind_of)
]


class FunctionName(Part):
    """A function, meant by its name."""

    name: Label


class NamedTool(Part):
    """A tool, meant by its function's name."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Part):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], FAST, Field(min_length=1, max_length=128)]


class AllowedChoice(Part):
    """`tool_choice` naming several."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Choice = Literal["none", "auto", "required"] | NamedTool | AllowedChoice


def skipped(tools: Sequence[object]) -> list[str]:
    """Name the tools that are not served, by their types."""
    return [f"tools.{tool.type}" for tool in tools if isinstance(tool, OtherTool)]


def read_tools(
    given: Sequence[ToolParam | OtherTool], choice: Choice | None, *, parallel: bool
) -> tuple[Sequence[Mapping[str, Any]], Calling | None]:
    """Give what the template is shown of the tools, and which may or must be called.

    Raises BadRequest for a choice that names no tool, for two tools of one name, and where no tool
    is a function.
    """
    tools = [tool for tool in given if isinstance(tool, ToolParam)]
    if given and not tools:
        others = ", ".join(sorted({f"'{tool.type[:64]}'" for tool in given}))
        raise BadRequest(
            f"Invalid 'tools[0].type': functions are the only tools served, not {others}.",
            param="tools[0].type",
            code="unsupported_value",
        )
    names = [tool.function.name for tool in tools]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
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
