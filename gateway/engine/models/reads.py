"""The keys of config.json that a class of mlx-lm reads, by its source."""

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import mlx_lm.models

_FOLDER = Path(mlx_lm.models.__path__[0])
_PREFIX = "mlx_lm.models."
_OTHERS = ("base", "cache")  # modules that have no part of a model


def architecture(model_class: type) -> str:
    """Return the name of the module of mlx-lm that a model's class, or one above it, is of."""
    modules = [each.__module__ for each in model_class.__mro__]
    return next((name[len(_PREFIX) :] for name in modules if name.startswith(_PREFIX)), "")


def reader_of(model_class: type) -> Callable[[str], bool]:
    """Return what tells of a key if a model's class reads it."""
    return read_names(architecture(model_class)).__contains__


@cache
def read_names(module: str) -> frozenset[str]:
    """Return the names of attributes, texts and constant arguments in the source of a module of
    mlx-lm's models, and of those that it imports. A key that is not among them is read by nothing:
    a field that only keeps a value is no reader.
    """
    found: set[str] = set()
    waiting, seen = [module], set(_OTHERS)
    while waiting:
        name = waiting.pop()
        file = _FOLDER / f"{name}.py"
        if name in seen or not file.is_file():
            continue
        seen.add(name)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            found |= set(_names(node))
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                waiting += [node.module] if node.module else [each.name for each in node.names]
    return frozenset(found)


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield node.attr
    elif isinstance(node, ast.keyword) and node.arg and isinstance(node.value, ast.Constant):
        yield f"{node.arg}={node.value.value!r}"
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
