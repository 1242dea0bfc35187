"""The tools of a Responses request: functions in OpenAI's flat form, alone or in namespaces."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from gateway.errors import BadRequest
from gateway.wire.bounds import FAST, NAME_CHARS, Schema
from gateway.wire.generation import Name
from gateway.wire.messages import (
    FUNCTION,
    OTHER,
    AllowedChoice,
    AllowedTools,
    AnyTool,
    Choice,
    FunctionName,
    FunctionParam,
    NamedTool,
    OtherTool,
    ToolParam,
    kind_of,
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
    """A function."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None

    def nested(self, name: str) -> ToolParam:
        """Return it as chat completions have it, under a name of its own."""
        return ToolParam(
            function=FunctionParam(
                name=name,
                description=self.description,
                parameters=self.parameters,
                strict=self.strict,
            )
        )

    def to_dict(self) -> ResponseFunctionTool:
        """Return it as the answer repeats it."""
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
    tools: Annotated[list[AnyTool[FunctionTool]], FAST, Field(max_length=MAX_TOOLS)]

    def to_dict(self) -> ResponseNamespace:
        """Return it as the answer repeats it."""
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
        lambda given: (
            "namespace tool"
            if isinstance(given, dict) and given.get("type") == "namespace"
            else kind_of(given)
        )
    ),
]
Place = tuple[str | None, str]  # a function's namespace, if any, and its name in it


@dataclass(frozen=True, slots=True)
class Toolset:
    """What the model is shown of a request's tools.

    `names` maps each function's place to the name that the model knows it by: its own, or where
    two namespaces share that, both names joined.
    """

    functions: Sequence[ToolParam | OtherTool]
    names: Mapping[Place, str]

    @property
    def places(self) -> Mapping[str, Place]:
        """Map the names that the model knows to where the functions stand."""
        return {name: place for place, name in self.names.items()}


def unpack(tools: Sequence[Tool]) -> Toolset:
    """Return the functions of all namespaces beside those without."""
    found = list(_functions(tools))
    uses = Counter(tool.name for _, tool in found if isinstance(tool, FunctionTool))
    names: dict[Place, str] = {}
    functions: list[ToolParam | OtherTool] = []
    for namespace, tool in found:
        if isinstance(tool, OtherTool):
            functions.append(tool)
            continue
        is_shared = namespace is not None and uses[tool.name] > 1
        name = f"{namespace}__{tool.name}"[:64] if is_shared else tool.name
        names[namespace, tool.name] = name
        functions.append(tool.nested(name))
    return Toolset(functions, names)


def _functions(tools: Sequence[Tool]) -> Iterator[tuple[str | None, FunctionTool | OtherTool]]:
    for tool in tools:
        if isinstance(tool, Namespace):
            for each in tool.tools:
                yield tool.name, each
        else:
            yield None, tool


def read_choice(given: Any) -> Choice | None:
    """Read OpenAI's flat form of a choice. Raises BadRequest for tools that are not functions."""
    match given:
        case "none" | "auto" | "required":
            return given  # type: ignore[no-any-return]
        case {"type": "function", "name": str(name)} if len(name) <= NAME_CHARS:
            return _named(name)
        case {
            "type": "allowed_tools",
            "mode": "auto" | "required" as mode,
            "tools": [*tools],
        } if len(tools) <= MAX_TOOLS:
            names = [read_choice(tool) for tool in tools]
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
    return NamedTool(type="function", function=FunctionName(name=name))
