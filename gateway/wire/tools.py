"""Tools and `tool_choice` in the formats of three APIs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import Field, Tag, model_validator
from typing_extensions import TypedDict

from gateway.errors import BadRequest
from gateway.jobs import chat
from gateway.wire.bounds import FAIL_FAST, Label, Name, Schema
from gateway.wire.validation import OTHER, Part, by_type

MAX_TOOLS = 128  # OpenAI's limit
MAX_ANTHROPIC_TOOLS = 512


class FunctionParam(Part):
    """A function as the client describes it."""

    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None

    def to_function(self) -> chat.Function:
        """Return the function for a job. Raises BadRequest if the parameters are no object."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        types = parameters.get("type", "object")
        if "object" not in (types if isinstance(types, list) else [types]):
            problem = f"The parameters of '{self.name}' should have the 'type' 'object'."
            raise BadRequest(problem, param="tools", code="invalid_function_parameters")
        return chat.Function(self.name, parameters, strict=bool(self.strict))

    def to_template(self) -> dict[str, Any]:
        function = {"name": self.name, "parameters": self.to_function().parameters}
        if self.description is not None:
            function = {"name": self.name, "description": self.description, **function}
        return {"type": "function", "function": function}


class ToolParam(Part):
    """A function among the tools of a chat completion."""

    type: Literal["function"] = "function"
    function: FunctionParam


class ResponseFunctionTool(TypedDict):
    """A function, as the response repeats it."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool


class FunctionTool(FunctionParam):
    """A function among the tools of a response."""

    type: Literal["function"]

    def to_dict(self) -> ResponseFunctionTool:
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": bool(self.strict),
        }


class CustomTool(FunctionParam):
    """A function in Anthropic's format, which the client runs."""

    harmless = frozenset({"allowed_callers", "cache_control", "eager_input_streaming"})

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
    parameters: Annotated[
        Schema,
        Field(
            alias="input_schema",
            json_schema_extra={
                "properties": {"type": {"const": "object"}},
                "required": ["type"],
            },
        ),
    ]


class OtherTool(Part):
    """A tool that is not served."""

    @property
    def model_extra(self) -> None:
        """Return None, so that the tool's fields are not listed as unknown."""

    type: Annotated[Label, Field(json_schema_extra={"not": {"enum": ["function", "namespace"]}})]


class ServerTool(OtherTool):
    """A tool that runs on Anthropic's servers, and is not served here."""

    type: Annotated[Label, Field(json_schema_extra={"not": {"enum": ["custom"]}})]


T = TypeVar("T")
FunctionOrOther = Annotated[
    Annotated[T, Tag("function tool")] | Annotated[OtherTool, Tag(OTHER)],
    by_type({"function": "function tool"}),
]
ChatTools = Annotated[
    list[FunctionOrOther[ToolParam]],
    FAIL_FAST,
    Field(default_factory=list, max_length=MAX_TOOLS),
]
AnthropicTools = Annotated[
    list[
        Annotated[
            Annotated[CustomTool, Tag("custom tool")] | Annotated[ServerTool, Tag(OTHER)],
            by_type({"custom": "custom tool"}),
        ]
    ],
    FAIL_FAST,
    Field(default_factory=list, max_length=MAX_ANTHROPIC_TOOLS),
]


class ResponseNamespace(TypedDict):
    """A namespace of functions, as the response repeats it."""

    type: Literal["namespace"]
    name: str
    description: str | None
    tools: list[ResponseFunctionTool]


class Namespace(Part):
    """A namespace of functions."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[list[FunctionOrOther[FunctionTool]], FAIL_FAST, Field(max_length=MAX_TOOLS)]

    def to_dict(self) -> ResponseNamespace:
        functions = [tool.to_dict() for tool in self.tools if isinstance(tool, FunctionTool)]
        return {
            "type": "namespace",
            "name": self.name,
            "description": self.description,
            "tools": functions,
        }


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("function tool")]
    | Annotated[Namespace, Tag("namespace tool")]
    | Annotated[OtherTool, Tag(OTHER)],
    by_type({"function": "function tool", "namespace": "namespace tool"}),
]
ResponseTools = Annotated[
    list[ResponseTool], FAIL_FAST, Field(default_factory=list, max_length=MAX_TOOLS)
]
QualifiedName = tuple[str | None, str]  # a function's namespace (or None) and name


@dataclass(frozen=True, slots=True)
class Toolset:
    """The tools of a response as the model sees them."""

    functions: Sequence[FunctionParam | OtherTool]
    # The model's names of the functions, with the namespace where several have the same name.
    names: Mapping[QualifiedName, str]

    @property
    def qualified_names(self) -> Mapping[str, QualifiedName]:
        return {name: qualified_name for qualified_name, name in self.names.items()}


def unpack(tools: Sequence[ResponseTool]) -> Toolset:
    pairs = list(_functions(tools))
    uses = Counter(tool.name for _, tool in pairs if isinstance(tool, FunctionTool))
    names: dict[QualifiedName, str] = {}
    functions: list[FunctionParam | OtherTool] = []
    for namespace, tool in pairs:
        if isinstance(tool, OtherTool):
            functions.append(tool)
            continue
        name = tool.name
        if namespace is not None and uses[name] > 1:
            name = f"{namespace}__{name}"[:64]
        names[namespace, tool.name] = name
        functions.append(tool.model_copy(update={"name": name}))
    return Toolset(functions, names)


def _functions(
    tools: Sequence[ResponseTool],
) -> Iterator[tuple[str | None, FunctionTool | OtherTool]]:
    for tool in tools:
        if isinstance(tool, Namespace):
            for inner_tool in tool.tools:
                yield tool.name, inner_tool
        else:
            yield None, tool


def unserved_tools(tools: Sequence[object]) -> list[str]:
    """Return the types of the tools that are not served, each as `tools.TYPE`."""
    return [f"tools.{tool.type}" for tool in tools if isinstance(tool, OtherTool)]


class FunctionName(Part):
    """A function, given by its name."""

    name: Label


class NamedTool(Part):
    """A tool, given by its function's name."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Part):
    """The tools that may be called, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], FAIL_FAST, Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Part):
    """A `tool_choice` that allows some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class NamedFunction(FunctionName):
    """A function of a response, given by its name."""

    type: Literal["function"]


class AllowedFunctions(Part):
    """A `tool_choice` of a response that allows some of the functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], FAIL_FAST, Field(min_length=1, max_length=MAX_TOOLS)]


class ToolChoiceParam(Part):
    """Anthropic's `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: Label | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> "ToolChoiceParam":
        if self.type == "tool" and self.name is None:
            raise ValueError("type 'tool' needs the 'name' of a tool")
        return self


ChoiceMode = Literal["none", "auto", "required"]
ToolChoice = ChoiceMode | NamedTool | AllowedChoice
ResponseToolChoice = ChoiceMode | NamedFunction | AllowedFunctions


class Selection(NamedTuple):
    """The functions that may be called."""

    names: Sequence[str] | None = None  # None for all functions
    forced: bool = False  # whether one must be called
    parallel: bool = True  # whether several may be called at once


def select(
    choice: ToolChoice | ResponseToolChoice | FunctionName | ToolChoiceParam | None,
    *,
    parallel: bool,
) -> Selection:
    names: Sequence[str] | None = None
    forced = False
    match choice:
        case "none" | ToolChoiceParam(type="none"):
            names = ()
        case "required" | ToolChoiceParam(type="any"):
            forced = True
        case NamedTool(function=FunctionName(name=name)) | FunctionName(name=name):
            return Selection([name], forced=True, parallel=False)
        case ToolChoiceParam(type="tool", name=str(name)):
            return Selection([name], forced=True, parallel=False)
        case AllowedChoice(allowed_tools=AllowedTools(mode=mode, tools=tools)):
            names, forced = [tool.function.name for tool in tools], mode == "required"
        case AllowedFunctions(mode=mode, tools=functions):
            names, forced = [function.name for function in functions], mode == "required"
    return Selection(names, forced, parallel)


def read_tools(
    tools: Sequence[FunctionParam | OtherTool], selection: Selection
) -> tuple[Sequence[Mapping[str, Any]], chat.Calling | None]:
    """Return the tools for the chat template, and the functions that may or must be called.

    Raises BadRequest for an unknown tool, two tools with one name, or tools without any function.
    """
    functions = {tool.name: tool for tool in tools if not isinstance(tool, OtherTool)}
    types = {tool.type[:64] for tool in tools if isinstance(tool, OtherTool)}
    if types and not functions:
        listed = ", ".join(f"'{kind}'" for kind in sorted(types))
        raise BadRequest(
            f"Invalid 'tools[0].type': functions are the only tools served, not {listed}.",
            param="tools[0].type",
            code="unsupported_value",
        )
    uses = Counter(tool.name for tool in tools if not isinstance(tool, OtherTool))
    for name, count in uses.items():
        if count > 1:
            raise BadRequest(f"Two tools are named '{name}'.", param="tools")
    names = list(functions) if selection.names is None else selection.names
    if selection.forced and not names:
        raise BadRequest("'tool_choice' asks for a call, but there are no 'tools'.", param="tools")
    for name in names:
        if name not in functions:
            raise BadRequest(
                f"Invalid 'tool_choice': there is no tool named '{name}'.", param="tool_choice"
            )
    if not names:
        return (), None
    # The tools keep the request's order, so that cached prefixes stay valid.
    allowed = [function for name, function in functions.items() if name in names]
    calling = chat.Calling(
        functions=[function.to_function() for function in allowed],
        forced=selection.forced,
        parallel=selection.parallel,
    )
    return [function.to_template() for function in allowed], calling


def check_input_schemas(tools: Sequence[CustomTool | ServerTool]) -> None:
    """Raise BadRequest, as Anthropic's API words it, if a schema does not describe an object."""
    for i, tool in enumerate(tools):
        if isinstance(tool, ServerTool) or tool.parameters.get("type") == "object":
            continue
        problem, code = "Input should be 'object'", "invalid_value"
        if "type" not in tool.parameters:
            problem, code = "Field required", "missing_required_parameter"
        raise BadRequest(
            f"tools.{i}.input_schema.type: {problem}",
            param=f"tools[{i}].input_schema",
            code=code,
        )
