"""The tools of a Responses request: functions in OpenAI's flat form, alone or in namespaces."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from gateway.errors import BadRequest
from gateway.wire.bounds import FAIL_FAST, NAME_CHARS, Name, Schema
from gateway.wire.messages import (
    FUNCTION,
    OTHER,
    AllowedChoice,
    AllowedTools,
    AnyTool,
    FunctionName,
    FunctionParam,
    NamedTool,
    OtherTool,
    ToolChoice,
    ToolParam,
    tool_tag,
)
from gateway.wire.validation import Part

MAX_TOOLS = 128


class ResponseFunctionTool(TypedDict):
    """A function, as the answer repeats it."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool


class ResponseNamespace(TypedDict):
    """Functions under a shared name, as the answer repeats them."""

    type: Literal["namespace"]
    name: str
    description: str | None
    tools: list[ResponseFunctionTool]


class FunctionTool(Part):
    """A function that the model may call."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None

    def to_tool_param(self, name: str) -> ToolParam:
        """Return the function in the form of chat completions, under the name for the model."""
        return ToolParam(
            function=FunctionParam(
                name=name,
                description=self.description,
                parameters=self.parameters,
                strict=self.strict,
            )
        )

    def to_dict(self) -> ResponseFunctionTool:
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": bool(self.strict),
        }


class Namespace(Part):
    """Functions under a shared name, which their calls repeat."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[list[AnyTool[FunctionTool]], FAIL_FAST, Field(max_length=MAX_TOOLS)]

    def to_dict(self) -> ResponseNamespace:
        functions = [tool.to_dict() for tool in self.tools if isinstance(tool, FunctionTool)]
        return {
            "type": "namespace",
            "name": self.name,
            "description": self.description,
            "tools": functions,
        }


Tool = Annotated[
    Annotated[FunctionTool, Tag(FUNCTION)]
    | Annotated[Namespace, Tag("namespace tool")]
    | Annotated[OtherTool, Tag(OTHER)],
    Discriminator(
        lambda value: (
            "namespace tool"
            if isinstance(value, dict) and value.get("type") == "namespace"
            else tool_tag(value)
        )
    ),
]
QualifiedName = tuple[str | None, str]  # a function's namespace, if any, and its name in it


@dataclass(frozen=True, slots=True)
class Toolset:
    """A request's tools as the model knows them.

    `names` maps each function to its name for the model: its own or, if several functions share
    that, its namespace and its own joined.
    """

    functions: Sequence[ToolParam | OtherTool]
    names: Mapping[QualifiedName, str]

    @property
    def qualified_names(self) -> Mapping[str, QualifiedName]:
        """Map the names for the model to the functions' own."""
        return {name: qualified_name for qualified_name, name in self.names.items()}


def unpack(tools: Sequence[Tool]) -> Toolset:
    """Return the functions of all namespaces, and those without one."""
    pairs = list(_functions(tools))
    uses = Counter(tool.name for _, tool in pairs if isinstance(tool, FunctionTool))
    names: dict[QualifiedName, str] = {}
    functions: list[ToolParam | OtherTool] = []
    for namespace, tool in pairs:
        if isinstance(tool, OtherTool):
            functions.append(tool)
            continue
        is_shared = namespace is not None and uses[tool.name] > 1
        name = f"{namespace}__{tool.name}"[:64] if is_shared else tool.name
        names[namespace, tool.name] = name
        functions.append(tool.to_tool_param(name))
    return Toolset(functions, names)


def _functions(tools: Sequence[Tool]) -> Iterator[tuple[str | None, FunctionTool | OtherTool]]:
    for tool in tools:
        if isinstance(tool, Namespace):
            for inner_tool in tool.tools:
                yield tool.name, inner_tool
        else:
            yield None, tool


def read_choice(value: Any) -> ToolChoice | None:
    """Read OpenAI's flat form of a choice. Raises BadRequest for tools that are not functions."""
    match value:
        case "none" | "auto" | "required":
            return value  # type: ignore[no-any-return]
        case {"type": "function", "name": str(name)} if len(name) <= NAME_CHARS:
            return _named_tool(name)
        case {
            "type": "allowed_tools",
            "mode": "auto" | "required" as mode,
            "tools": [*tools],
        } if len(tools) <= MAX_TOOLS:
            names = [read_choice(tool) for tool in tools]
            functions = [name for name in names if isinstance(name, NamedTool)]
            if functions and len(functions) == len(names):
                allowed = AllowedTools(mode=mode, tools=functions)
                return AllowedChoice(type="allowed_tools", allowed_tools=allowed)
    raise BadRequest(
        "Invalid 'tool_choice': it should be 'none', 'auto', 'required', a function's name as "
        "{'type': 'function', 'name': …}, or 'allowed_tools' of such.",
        param="tool_choice",
        code="invalid_value",
    )


def _named_tool(name: str) -> NamedTool:
    return NamedTool(type="function", function=FunctionName(name=name))
