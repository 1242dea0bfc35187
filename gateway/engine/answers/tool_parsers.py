"""The text of a tool call, as one family of models writes it → its function and arguments.

Formats whose values are text take their types from the function's own schema. Each reader gives
{"name", "arguments"} and, where the model makes one, the call's "id"; it raises for what is not
such a call. mlx-lm's parsers are used where a value's type stands in the text.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from importlib import import_module
from typing import Any, Final

Schemas = Mapping[str, Mapping[str, Any]]  # of each function's arguments, by its name
Call = Mapping[str, Any]
Reader = Callable[[str, Schemas], Sequence[Call]]

_FENCE = re.compile(r"^\s*```\w*\n?|\n?```\s*$")
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_DEPTH = 16  # of references and alternatives followed in a parameter's schema


def read_json(text: str, schemas: Schemas) -> list[Call]:
    """Read JSON: a call, a list of calls, or several one after another, as Llama writes them."""
    return list(_json_calls(_FENCE.sub("", text)))


def read_arguments(name: str, text: str) -> Call:
    """Read a call whose text is only its arguments, and may be empty."""
    return _call(name, json.loads(text) if text.strip() else {})


def read_mistral(text: str, schemas: Schemas) -> list[Call]:
    """Read Mistral's: a list in JSON, or from v11 on `name[CALL_ID]id[ARGS]{…}`.

    Source: mistral-common's encoding of assistant messages, and vLLM's tests, where [ARGS] is
    missing as its tokenizer drops it.
    """
    if text.lstrip().startswith(("[", "{")):
        return list(_json_calls(text))
    calls, at = [], 0
    while text[at:].strip():
        head = _MISTRAL.match(text, at)
        if head is None:
            raise ValueError("no name before the arguments")
        arguments, at = _DECODER.raw_decode(text, head.end())
        calls.append(_call(head["name"], arguments, head["id"]))
    return calls


def read_deepseek(text: str, schemas: Schemas) -> list[Call]:
    """Read V3's and R1's `function<sep>name` with fenced JSON below, and V3.1's `name<sep>{…}`."""
    head, sep, rest = text.partition("<｜tool▁sep｜>")
    if not sep:
        raise ValueError("no separator")
    name = head
    if not rest.lstrip().startswith("{"):
        name, _, rest = rest.partition("\n")
    return [_call(name.strip(), json.loads(_FENCE.sub("", rest)))]


def read_python(text: str, schemas: Schemas) -> list[Call]:
    """Read `[f(a=1), g()]`, or JSON: Llama 3.2 and 4 write either, LFM2 the first."""
    text = text.strip().removesuffix("<|python_end|>").strip()
    if text.startswith(("{", "[{")):
        return read_json(text, schemas)
    read = ast.parse(text, mode="eval").body
    if not isinstance(read, ast.List):
        raise ValueError("no list of calls")
    return [_python_call(node) for node in read.elts]


class _Literals(ast.NodeTransformer):
    """Reads JSON's literals, which models write into Python, as what they are."""

    _VALUES: Final = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._VALUES[node.id]) if node.id in self._VALUES else node


def _python_call(node: ast.expr) -> Call:
    # Literals with names alone: mlx-lm's parser guesses at all others, and cuts
    # `f(a=1+2), g(b=3)` into one call.
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call by names")
    arguments: dict[Any, Any] = {
        keyword.arg: ast.literal_eval(_Literals().visit(keyword.value)) for keyword in node.keywords
    }
    if None in arguments:
        raise ValueError("an argument without a name")
    return _call(ast.unparse(node.func), arguments)


def read_gemma(text: str, schemas: Schemas) -> list[Call]:
    """Read `call:f{a:1,b:<|"|>text<|"|>}`; FunctionGemma's marks of text are other tokens."""
    read = _read_as_mlx_lm("gemma4", text.replace("<escape>", '<|"|>'))
    if isinstance(read, list):
        return read
    return [read]


def read_kimi(text: str, schemas: Schemas) -> list[Call]:
    """Read K2's `functions.f:0<|tool_call_argument_begin|>{…}`, whose id its template needs."""
    read = _read_as_mlx_lm("kimi_k2", text)
    return [_call(call["name"], call["arguments"], call["id"]) for call in read]


def read_kimi_k3(text: str, schemas: Schemas) -> list[Call]:
    """Read K3's arguments, each with its type given."""
    calls: list[Call] = _read_as_mlx_lm("kimi_k3", text)
    return calls


def _rename_keys(call: str, pair: str, *, wraps: bool = False) -> Reader:
    """Return a reader of calls whose arguments are pairs of names and texts.

    `call` finds a call's `name` and `body`, `pair` an argument's `name` and `value` and, if there
    is one, whether it `is_text`. `wraps` is True if values stand on lines of their own.
    """
    calls, pairs = re.compile(call, re.DOTALL), re.compile(pair, re.DOTALL)

    def read(text: str, schemas: Schemas) -> list[Call]:
        if text.lstrip().startswith("{"):  # GLM and Longcat also write JSON
            return read_json(text, schemas)
        matches = list(calls.finditer(text))
        if not matches:
            raise ValueError("no call")
        return [read_call(match, schemas) for match in matches]

    def read_call(match: re.Match[str], schemas: Schemas) -> Call:
        name = _unquote(match["name"])
        schema = schemas.get(name, {})
        arguments = {
            _unquote(pair["name"]): _value(pair, schema, wraps=wraps)
            for pair in pairs.finditer(match["body"])
        }
        return _call(name, arguments)

    return read


read_qwen = _rename_keys(
    r"<function=(?P<name>[^>\n]+)>(?P<body>.*?)(?:</function>|\Z)",
    r"<parameter=(?P<name>[^>\n]+)>(?P<value>.*?)(?:</parameter>|(?=<parameter=)|\Z)",
    wraps=True,
)
read_seed = _rename_keys(
    r"<function=(?P<name>[^>\n]+)>(?P<body>.*?)(?:</function>|\Z)",
    r"<parameter=(?P<name>[^>\n]+)>(?P<value>.*?)</parameter>",
)
read_minimax = _rename_keys(
    r"<invoke name=(?P<name>[^>]+)>(?P<body>.*?)</invoke>",
    r"<parameter name=(?P<name>[^>]+)>(?P<value>.*?)</parameter>",
)
read_glm = _rename_keys(
    r"\A(?P<name>[^<{]+)(?P<body><arg_key>.*|)\Z",
    r"<arg_key>(?P<name>.*?)</arg_key>(?:\\n|\s)*<arg_value>(?P<value>.*?)</arg_value>",
)
read_longcat = _rename_keys(
    r"\A(?P<name>[^<{]+)(?P<body><longcat_arg_key>.*|)\Z",
    r"<longcat_arg_key>(?P<name>.*?)</longcat_arg_key>(?:\\n|\s)*"
    r"<longcat_arg_value>(?P<value>.*?)</longcat_arg_value>",
)
read_minicpm = _rename_keys(
    r"\A\s*(?P<name>\"[^\"]*\"|'[^']*'|[^\s\"'<>]+)\s*>(?P<body>.*)\Z",
    r"<param\s+name\s*=\s*(?P<name>\"[^\"]*\"|'[^']*'|[^\s\"'<>]+)\s*>"
    r"(?:\s*<!\[CDATA\[(?P<cdata>.*?)\]\]>\s*|(?P<value>.*?))</param>",
)
# DeepSeek V3.2 says of each argument whether it is text.
_DSML = "｜DSML｜"
read_dsml = _rename_keys(
    rf'<{_DSML}invoke name="(?P<name>[^"]+)">(?P<body>.*?)</{_DSML}invoke>',
    rf'<{_DSML}parameter name="(?P<name>[^"]+)"(?: string="(?P<is_text>true|false)")?>'
    rf"(?P<value>.*?)</{_DSML}parameter>",
)
read_atem = _rename_keys(
    r'<atem:invoke\b[^>]*?\bname="(?P<name>[^"]+)">(?P<body>.*?)</atem:invoke>',
    r'<atem:parameter\b[^>]*?\bname="(?P<name>[^"]+)"[^>]*?>(?P<value>.*?)</atem:parameter>',
)

_DECODER = json.JSONDecoder()
_MISTRAL = re.compile(
    r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*(?P<id>[\w-]+)\s*)?(?:\[ARGS\]\s*)?(?=\{)"
)


def _json_calls(text: str) -> Iterator[Call]:
    """Yield the calls of JSON values that follow one another; text after them is ignored."""
    at, count = 0, 0
    while text[at:].lstrip("; \n\r\t,"):
        at += len(text[at:]) - len(text[at:].lstrip("; \n\r\t,"))
        try:
            value, at = _DECODER.raw_decode(text, at)
        except ValueError:
            if count:
                return
            raise
        items = value if isinstance(value, list) else [value]
        yield from map(_json_call, items)
        count += len(items)


def _json_call(value: Any) -> Call:
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name") or value.get("tool_name") or value["function"]
    arguments = value.get("arguments")
    if arguments is None:
        arguments = value.get("parameters")
    if arguments is None:
        arguments = {}
    return _call(name, arguments, value.get("id"))


def _call(name: Any, arguments: Any, call_id: Any = None) -> Call:
    if isinstance(arguments, str):
        arguments = json.loads(arguments)  # of some models, an object inside a string
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise ValueError("not a call")
    call = {"name": name, "arguments": arguments}
    if call_id and isinstance(call_id, str):
        call["id"] = call_id
    return call


def _value(pair: re.Match[str], schema: Mapping[str, Any], *, wraps: bool) -> Any:
    """Return an argument's value: text, or what its schema says that the text stands for."""
    groups = pair.groupdict()
    text = groups.get("cdata")
    if text is None:
        text = groups["value"]
        if wraps:
            text = text.removeprefix("\n").removesuffix("\n")
    is_text = groups.get("is_text")
    if is_text == "true":
        return text
    types: frozenset[str] = frozenset()
    properties = schema.get("properties")
    if is_text is None and isinstance(properties, Mapping):
        types = types_of(properties.get(_unquote(groups["name"])), schema)
    return convert_arguments(text, types)


def _unquote(name: str) -> str:
    return name.strip().strip("\"'")


def convert_arguments(text: str, types: frozenset[str]) -> Any:
    """Return the value that a text stands for, one of the JSON types where any are known."""
    if not types:
        return _guess(text)
    if types != {"string"}:
        bare = text.strip()
        if bare.lower() in ("true", "false"):
            bare = bare.lower()
        elif bare in ("None", "nil", "NULL"):
            bare = "null"
        value = _guess(bare)
        if isinstance(value, float) and value.is_integer() and "integer" in types:
            value = int(value)
        if any(_TYPES[name](value) for name in types if name in _TYPES):
            return value
    return text


def _guess(text: str) -> Any:
    """Return JSON's value, Python's list or dict, or else the text itself.

    What JSON has no words for stays text too: NaN, a number beyond all floats, Python's sets.
    """
    readers: list[Callable[[str], Any]] = [partial(json.loads, strict=False)]
    if text.lstrip().startswith(("[", "{")):
        readers.append(lambda text: ast.literal_eval(text.strip()))  # some write Python's
    for read in readers:
        try:
            value = read(text)
            json.dumps(value, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        return value
    return text


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows, as far as it says; empty if it doesn't.

    Keywords of one schema narrow each other; among alternatives, those that say nothing don't
    count, unless something else does say.
    """
    return _Types(root).of(schema)


class _Types:
    """Reads the types of subschemas of one root, each reference once."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._referred: dict[str, frozenset[str]] = {}

    def of(self, schema: Any, depth: int = _DEPTH) -> frozenset[str]:
        if not isinstance(schema, Mapping) or depth == 0:
            return frozenset()
        constraints = [_stated_types(schema)]
        ref, parts = schema.get("$ref"), schema.get("allOf")
        if isinstance(ref, str):
            constraints.append(self._at(ref, depth))
        if isinstance(parts, list):
            constraints += [self.of(part, depth - 1) for part in parts]
        alternatives: frozenset[str] = frozenset()
        for branches in (schema.get("anyOf"), schema.get("oneOf")):
            if isinstance(branches, list):
                branch_types = [self.of(branch, depth - 1) for branch in branches]
                alternatives = frozenset().union(*branch_types)
                if all(branch_types):
                    constraints.append(alternatives)
        stated = [types for types in constraints if types]
        if stated:
            return reduce(_both, stated)
        return alternatives or frozenset({"object"} if "properties" in schema else ())

    def _at(self, ref: str, depth: int) -> frozenset[str]:
        if ref not in self._referred:
            self._referred[ref] = frozenset()  # while it is followed: it may lead to itself
            self._referred[ref] = self.of(_resolve(ref, self._root), depth - 1)
        return self._referred[ref]


def _stated_types(schema: Mapping[str, Any]) -> frozenset[str]:
    stated = schema.get("type")
    if isinstance(stated, str):
        return frozenset({stated})
    if isinstance(stated, list):
        return frozenset(name for name in stated if isinstance(name, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset(map(_type_of, values)) if isinstance(values, list) else frozenset()


def _both(left: frozenset[str], right: frozenset[str]) -> frozenset[str]:
    """Return the types that two schemas allow together: integers are numbers, too."""
    both = left & right
    pairs = ((left, right), (right, left))
    if "number" not in both and any("integer" in a and "number" in b for a, b in pairs):
        return both | {"integer"}
    return both


def _type_of(value: Any) -> str:
    return next((name for name, holds in _TYPES.items() if holds(value)), "string")


def _resolve(ref: str, root: Mapping[str, Any]) -> Any:
    """Return what a reference within the function's own schema points to."""
    if not ref.startswith("#/"):
        return None
    place: Any = root
    for step in ref.removeprefix("#/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        place = place.get(name) if isinstance(place, Mapping) else None
    return place


def _read_as_mlx_lm(family: str, text: str) -> Any:
    # Only models of these families need it, and mlx_lm brings mlx, which this room is free of.
    return import_module(f"mlx_lm.tool_parsers.{family}").parse_tool_call(text)
