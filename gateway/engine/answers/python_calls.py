"""Bodies of calls in Python → calls: `[f(a=1), g()]`, or one call without brackets.

Nothing is run: a call has names and literals, and what is more of a program than that is none.
Names may have dashes and dots, which Python's have not.
"""

import ast
import re
from collections.abc import Sequence
from typing import Any

from gateway.engine.answers.call_reading import Call, Schemas, Unfinished
from gateway.engine.answers.json_calls import read_json
from gateway.engine.answers.literals import UNREADABLE, find_end, parse_python, skip_space

_JSON = re.compile(r"\{|\[\s*+[{\]]")
_NAME = re.compile(r"[\w.$-]*+\s*+")


def read_python(
    text: str, at: int, schemas: Schemas, closers: Sequence[str]
) -> tuple[list[Call], int]:
    """Read a list of calls, or JSON: Llama 3.2 and 4 write either, LFM2 the first.

    Without brackets, as Llama 3.1 writes `f.call(a="x")`, a function that is offered is called.
    """
    at = skip_space(text, at)
    if _JSON.match(text, at):
        return read_json(text, at, schemas, closers)
    if not text.startswith("[", at):
        name = _NAME.match(text, at)
        assert name is not None  # it may be empty
        if name.end() == len(text):
            raise Unfinished("no whole name")
        if text[name.end()] != "(" or _own_name(name[0].strip(), schemas) not in schemas:
            raise ValueError("no function of that name")
    end, depth = find_end(text, at, closers, is_lenient=True)
    try:
        tree, names = parse_python(text[at:end] if depth == 0 else "")
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_call(node, names, schemas) for node in nodes], end
    except UNREADABLE:
        return [], end


def _own_name(name: str, schemas: Schemas) -> str:
    return name if name in schemas else name.removesuffix(".call")


def _call(node: ast.expr, names: Sequence[str], schemas: Schemas) -> Call:
    # Literals by their names alone: nothing says which arguments `f(1)` and `f(a=1+2)` have.
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)) or node.args:
        raise ValueError("not a call by names")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("an argument without a name")
        arguments[names[int(keyword.arg[1:])]] = ast.literal_eval(keyword.value)
    name = names[int(node.func.id[1:])]
    own_name = _own_name(name, schemas)
    return {"name": own_name if own_name in schemas else name, "arguments": arguments}
