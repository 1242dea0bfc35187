"""YAML text → plain values that remember the line each was written on.

Safe by construction: only YAML's own plain types are built, any other tag is a problem.
Problems are collected, so that one reading reports them all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import yaml

from gateway.registry.expansion import ExpansionInvalid, expand

Where = tuple[str | int, ...]
"""The keys and indices that lead to a value."""

_SCALARS = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null")
)
_STR = "tag:yaml.org,2002:str"


class _Loader(yaml.SafeLoader):
    """A safe loader without dates: `2024-01-01` is text, as everyone but YAML expects."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:timestamp"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


@dataclass(slots=True)
class Document:
    """What a file says, where it says it, and what kept parts of it from being read."""

    value: Any = None
    lines: dict[Where, int] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)
    broken: set[Where] = field(default_factory=set)
    """Values already reported, so that their absence is not a second problem."""
    variables: set[str] = field(default_factory=set)
    defaults: set[Where] = field(default_factory=set)
    """Values that are variables' defaults: nobody has set them."""

    def line(self, where: Where) -> int:
        """Find the line of a value, or of the nearest mapping or list around it."""
        while where and where not in self.lines:
            where = where[:-1]
        return self.lines.get(where, 1)


class _Nothing(Enum):
    """What stands where there is no value."""

    ABSENT = auto()
    """An expansion that came out empty: as if its key were not there."""
    BROKEN = auto()
    """A value that was reported; in a list its place is kept, so that others keep theirs."""


def read_yaml(text: str, variables: Mapping[str, str]) -> Document:
    """Parse a YAML document, expanding variables in its values; never raises."""
    document = Document()
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            built = _Builder(loader, document, variables).build(node, (), ())
            document.value = None if isinstance(built, _Nothing) else built
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        document.problems.append((mark.line + 1 if mark else 1, f"not YAML: {error.problem}"))
    except yaml.YAMLError as error:
        document.problems.append((1, f"not YAML: {str(error).splitlines()[0]}"))
    except RecursionError:
        document.problems.append((1, "nested too deeply"))
    finally:
        if loader is not None:
            loader.dispose()
    return document


def _plain_tag(loader: _Loader, text: str) -> str:
    resolve: Callable[..., str] = loader.resolve
    return resolve(yaml.ScalarNode, text, (True, False))


def plain_value(text: str) -> object:
    """Read a text as YAML reads a plain scalar: a number, a boolean, null, else the text."""
    loader = _Loader("")
    tag = _plain_tag(loader, text)
    try:
        return loader.construct_object(yaml.ScalarNode(tag, text)) if tag in _SCALARS else text
    except ValueError:  # `0b_` looks like a number
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
        for each in node.value:
            item = self.build(each, (*where, len(built)), around)
            if item is not _Nothing.ABSENT:
                built.append(None if item is _Nothing.BROKEN else item)
        return built

    def _mapping(
        self, node: yaml.MappingNode, where: Where, around: tuple[yaml.Node, ...]
    ) -> dict[str, Any]:
        if id(node) not in self._flat:  # an anchor's mapping is built once for each mention
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
            if not isinstance(item, _Nothing):
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
            expansion = expand(node.value, self._variables)
        except ExpansionInvalid as error:
            return self._problem(node, where, str(error))
        tag = node.tag
        if expansion.variables:
            self._document.variables.update(expansion.variables)
            if not expansion.text:
                return _Nothing.ABSENT
            if expansion.is_default:
                self._document.defaults.add(where)
            if node.style is None and tag == _STR:  # unquoted: `${X:-32}` is a number
                tag = _plain_tag(self._loader, expansion.text)
        if tag not in _SCALARS:
            return self._problem(node, where, f"the tag {tag!r} is not allowed here")
        try:
            scalar = yaml.ScalarNode(tag, expansion.text, node.start_mark, node.end_mark)
            return self._loader.construct_object(scalar)
        except (ValueError, KeyError, IndexError):
            return self._problem(node, where, f"{expansion.text!r} is not of its tag's type")

    def _problem(self, node: yaml.Node, where: Where | None, message: str) -> _Nothing:
        if where is not None:
            self._document.broken.add(where)
        self._document.problems.append((node.start_mark.line + 1, message))
        return _Nothing.BROKEN
