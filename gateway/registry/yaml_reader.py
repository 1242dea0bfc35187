"""Parses YAML into plain values with their lines, and replaces ${VAR:-default} in them.

Problems are collected and reported together.
"""

# ruamel.yaml would stop at the first repeated key, and would convert values before variables are
# replaced.

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from gateway.registry.names import did_you_mean, nearest

MAX_VALUES = 100_000  # values in a file; 480 bytes with anchors can expand to hundreds of millions

# The keys and indices that lead to a value.
Where = tuple[str | int, ...]

_SCALARS = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null")
)
_STR = "tag:yaml.org,2002:str"


class _Loader(yaml.SafeLoader):
    """A safe loader that reads dates as text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:timestamp"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


@dataclass(slots=True)
class Document:
    """A parsed file: its value, the lines of all parts, and its problems."""

    value: Any = None
    lines: dict[Where, int] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)
    # Places whose value is missing because of a reported problem.
    broken: set[Where] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)

    def line(self, where: Where) -> int:
        """Return the line of a value, or of the nearest mapping or list around it."""
        while where and where not in self.lines:
            where = where[:-1]
        return self.lines.get(where, 1)


_PART = re.compile(
    r"\$\$|\$\{(?P<name>[A-Za-z_]\w*)(?P<fallback>:-(?P<default>[^{}]*))?\}|(?P<broken>\$\{)"
)


class ExpansionInvalid(ValueError):
    """Raised for an unset variable, or for braces that are not closed."""


def expand(text: str, variables: Mapping[str, str]) -> tuple[str, list[str]]:
    """Replace `${VAR}` and `${VAR:-default}`, and return the text and the variables' names.

    `$$` becomes a dollar sign. The default replaces an unset or empty variable. Raises
    ExpansionInvalid.
    """
    names: list[str] = []

    def value(match: re.Match[str]) -> str:
        if match["broken"]:
            start = text[match.start() :].partition("\n")[0][:40]
            raise ExpansionInvalid(
                f"{start!r} is not ${{VAR}} or ${{VAR:-default}} (braces do not nest; "
                "$$ writes a dollar sign)"
            )
        name = match["name"]
        if not name:
            return "$"
        names.append(name)
        if match["fallback"]:
            return variables.get(name) or match["default"]
        if name not in variables:
            hint = did_you_mean(nearest(name, variables))
            raise ExpansionInvalid(f"${{{name}}} is not set and has no default{hint}")
        return variables[name]

    return _PART.sub(value, text), names


# Stands for a value that is empty after its variables are replaced. Its key is left out.
_ABSENT = object()


def read_yaml(text: str, variables: Mapping[str, str]) -> Document:
    document = Document()
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None and _count_values(node, {}) > MAX_VALUES:
            document.problems.append((1, f"its anchors expand to over {MAX_VALUES:,} values"))
        elif node is not None:
            document.value = _Builder(loader, document, variables).build(node, (), ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        document.problems.append((line, f"not YAML: {error.problem}"))
    except yaml.YAMLError as error:
        document.problems.append((1, f"not YAML: {str(error).splitlines()[0]}"))
    except RecursionError:
        document.problems.append((1, "nested too deeply"))
    finally:
        if loader is not None:
            loader.dispose()
    return document


def _count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    # The values of an anchor count once for each use.
    if id(node) not in counts:
        counts[id(node)] = 1  # ends the walk if the node contains itself
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        counts[id(node)] += sum(_count_values(child, counts) for child in children)
    return counts[id(node)]


def _plain_tag(loader: _Loader, text: str) -> str:
    resolve: Callable[..., str] = loader.resolve
    return resolve(yaml.ScalarNode, text, (True, False))


def read_plain_value(text: str) -> object:
    """Return the value of a text in YAML without quotes, or else the text."""
    loader = _Loader("")
    tag = _plain_tag(loader, text)
    try:
        if tag in _SCALARS:
            return loader.construct_object(yaml.ScalarNode(tag, text))
        return text
    except ValueError:  # the text looks like a number, such as `0b_`
        return text


class _Builder:
    def __init__(self, loader: _Loader, document: Document, variables: Mapping[str, str]) -> None:
        self._loader = loader
        self._document = document
        self._variables = variables
        self._flat: set[int] = set()

    def build(self, node: yaml.Node, where: Where, around: tuple[yaml.Node, ...]) -> Any:
        self._document.lines.setdefault(where, node.start_mark.line + 1)
        if node in around:
            return self._problem(node, where, "an anchor contains itself")
        around = (*around, node)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, where)
        if isinstance(node, yaml.SequenceNode) and node.tag.endswith(":seq"):
            return self._list(node, where, around)
        if isinstance(node, yaml.MappingNode) and node.tag.endswith(":map"):
            return self._mapping(node, where, around)
        return self._problem(node, where, f"the tag {node.tag!r} is not allowed here")

    def _list(
        self, node: yaml.SequenceNode, where: Where, around: tuple[yaml.Node, ...]
    ) -> list[Any]:
        built: list[Any] = []
        for child in node.value:
            item = self.build(child, (*where, len(built)), around)
            if item is not _ABSENT:
                built.append(item)
        return built

    def _mapping(
        self, node: yaml.MappingNode, where: Where, around: tuple[yaml.Node, ...]
    ) -> dict[str, Any]:
        if id(node) not in self._flat:  # a mapping with an anchor is built again for each use
            self._flat.add(id(node))
            self._report_duplicates(node)
            self._loader.flatten_mapping(node)
        built: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._problem(key, None, "a key must be text")
                continue
            here = (*where, key.value)
            self._document.lines[here] = key.start_mark.line + 1
            item = self.build(value, here, around)
            built.pop(key.value, None)
            if item is not _ABSENT:
                built[key.value] = item
        return built

    def _report_duplicates(self, node: yaml.MappingNode) -> None:
        first: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            earlier = first.setdefault(key.value, key)
            if earlier is not key:
                line = earlier.start_mark.line + 1
                self._problem(key, None, f"{key.value!r} is already given on line {line}")

    def _scalar(self, node: yaml.ScalarNode, where: Where) -> Any:
        try:
            text, names = expand(node.value, self._variables)
        except ExpansionInvalid as error:
            return self._problem(node, where, str(error))
        tag = node.tag
        if names:
            self._document.variables.update(names)
            if not text:
                return _ABSENT
            if node.style is None and tag == _STR:  # unquoted: `${X:-32}` is a number
                tag = _plain_tag(self._loader, text)
        if tag not in _SCALARS:
            return self._problem(node, where, f"the tag {tag!r} is not allowed here")
        try:
            scalar = yaml.ScalarNode(tag, text, node.start_mark, node.end_mark)
            return self._loader.construct_object(scalar)
        except (ValueError, KeyError, IndexError):
            return self._problem(node, where, f"{text!r} is not of its tag's type")

    def _problem(self, node: yaml.Node, where: Where | None, message: str) -> None:
        if where is not None:
            self._document.broken.add(where)
        self._document.problems.append((node.start_mark.line + 1, message))
