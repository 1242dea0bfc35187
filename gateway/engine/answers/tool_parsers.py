"""The text of a tool call, as one family of models writes it → its function and arguments.

Formats whose values are text take their types from the function's own schema. Each reader gives
{"name", "arguments"} and, where the model makes one, the call's "id"; it raises for what is not
such a call. mlx-lm's parsers are used where a value's type stands in the text.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from gateway.engine.answers import gemma_calls, json_calls, python_calls
from gateway.engine.answers.call_reading import Call, ReadBody, Schemas
from gateway.engine.answers.call_values import convert_arguments, read_argument, types_of
from gateway.engine.answers.json_calls import read_arguments

__all__ = ["convert_arguments", "read_arguments", "types_of"]

Reader = Callable[[str, Schemas], Sequence[Call]]

_FENCE = re.compile(r"^\s*```\w*\n?|\n?```\s*$")
_END = "\0"


def _read_all(read: ReadBody) -> Reader:
    """Return a reader of a text that is nothing but bodies, one after another."""

    def read_bodies(text: str, schemas: Schemas) -> list[Call]:
        text = _FENCE.sub("", text.strip().removesuffix("<|python_end|>"))
        calls: list[Call] = []
        at = 0
        while text[at:].strip("; \n\r\t,"):
            at += len(text[at:]) - len(text[at:].lstrip("; \n\r\t,"))
            try:
                found, at = read(f"{text}{_END}", at, schemas, (_END,))
            except ValueError:
                if calls:
                    break
                raise
            if not found:
                raise ValueError("no call")
            calls += found
        return calls

    return read_bodies


read_json = _read_all(json_calls.read_json)
read_mistral = _read_all(json_calls.read_mistral)
read_deepseek = _read_all(json_calls.read_deepseek)
read_kimi = _read_all(json_calls.read_kimi)
read_python = _read_all(python_calls.read_python)
read_gemma = _read_all(gemma_calls.read_gemma)


def read_kimi_k3(text: str, schemas: Schemas) -> Sequence[Call]:
    """Read K3's arguments, each with its type given."""
    calls: Sequence[Call] = _read_as_mlx_lm("kimi_k3", text)
    return calls


def _rename_keys(call: str, pair: str, *, wraps: bool = False) -> Reader:
    """Return a reader of calls whose arguments are pairs of names and texts.

    `call` finds a call's `name` and `body`, `pair` an argument's `name` and `value` and, if there
    is one, whether it `is_text`. `wraps` is True if values stand on lines of their own.
    """
    calls, pairs = re.compile(call, re.DOTALL), re.compile(pair, re.DOTALL)

    def read(text: str, schemas: Schemas) -> Sequence[Call]:
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
        return {"name": name, "arguments": arguments}

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
    return read_argument(_unquote(groups["name"]), text, {} if is_text else schema)


def _unquote(name: str) -> str:
    return name.strip().strip("\"'")


def _read_as_mlx_lm(family: str, text: str) -> Any:
    # Only models of these families need it, and mlx_lm brings mlx, which this room is free of.
    return import_module(f"mlx_lm.tool_parsers.{family}").parse_tool_call(text)
