"""A JSON Schema of any draft, checked against that draft and rewritten in draft 2020-12."""

import re
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any, Final
from urllib.parse import quote, urljoin

import jsonschema_rs
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

from gateway.engine.grammar.schemas import Node, Schema, escape, rebuild, refusal, resolve, walk


class Draft(Enum):
    """A version of JSON Schema, by the identifier of its own schema."""

    D4 = "http://json-schema.org/draft-04/schema"
    D6 = "http://json-schema.org/draft-06/schema"
    D7 = "http://json-schema.org/draft-07/schema"
    D2019 = "https://json-schema.org/draft/2019-09/schema"
    D2020 = "https://json-schema.org/draft/2020-12/schema"


NEWEST: Final = Draft.D2020
_REFS_STAND_ALONE: Final = (Draft.D4, Draft.D6, Draft.D7)
_BY_NAME: Final = {draft.value.partition("://")[2]: draft for draft in Draft}
_BESIDE_REF: Final = frozenset({"$ref", "$defs", "definitions", "x-guidance", "$id", "id"})
_REWRITTEN: Final = frozenset(
    {
        *("oneOf", "not", "if", "then", "else", "contains", "propertyNames", "patternProperties"),
        *("dependencies", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
    }
)
_NOUNS: Final = {
    **{name: f"a {name}" for name in ("string", "number", "boolean")},
    **{name: f"an {name}" for name in ("integer", "object", "array")},
    "null": "null",
}
_PROBLEMS: Final = {
    "minimum": "must be at least {}",
    "exclusiveMinimum": "must be above {}",
    "minItems": "must have at least {} item",
    "uniqueItems": "must have no item twice",
}
_LARGEST: Final = 2**53  # beyond it neighbouring integers are one double, and llguidance has those
_UPPER: Final = ("maximum", "exclusiveMaximum")
_LOWER: Final = ("minimum", "exclusiveMinimum")


def draft_of(schema: Schema) -> Draft:
    """Return the draft that `$schema` names; the newest if it names no known one."""
    name = schema.get("$schema") if isinstance(schema, dict) else None
    if not isinstance(name, str):
        return NEWEST
    return _BY_NAME.get(name.partition("://")[2].rstrip("#"), NEWEST)


def check_draft(schema: Schema) -> Draft:
    """Check a schema against its draft's own schema. Raises BadRequest naming keyword and place."""
    draft = draft_of(schema)
    found = next(_own_schema(draft).iter_errors(schema), None)
    if found is not None:
        path = [escape(str(part)) for part in found.instance_path] or [""]
        name = draft.value.split("/")[-2].removeprefix("draft-").lstrip("0")
        raise refusal(
            f"The JSON Schema is not valid: `{path[-1]}` at {'/'.join(['#', *path])} "
            f"{_problem(path[-1], found.kind)} in draft {name}."
        )
    return draft


def _problem(keyword: str, kind: Any) -> str:
    """Return what a keyword's value must be; `kind` is the error's, of jsonschema_rs."""
    if kind.name == "type":
        return f"must be {' or '.join(_NOUNS[name] for name in kind.types)}"
    if kind.name in _PROBLEMS:
        return _PROBLEMS[kind.name].format(kind.value)
    if keyword == "type":
        return "must be the name of a type, or an array of some,"
    return "is not allowed"


@cache
def _own_schema(draft: Draft) -> Any:
    # Formats are not looked at: `pattern` is ECMA's, which few libraries' own dialect is.
    return jsonschema_rs.validator_for(REGISTRY.contents(draft.value), validate_formats=False)


def modernize(schema: Schema, draft: Draft = NEWEST) -> Schema:
    """Rewrite older drafts' keywords in draft 2020-12, and leave out keywords that say nothing.

    A list of `items` becomes `prefixItems`, `dependencies` are split, references become pointers
    from the root (those that lead out of the schema stay as they are), and bounds beyond 2^53 are
    drawn in to it, since the compilers count in doubles.
    """
    stands_alone = draft in _REFS_STAND_ALONE

    def change(node: Schema) -> Schema:
        if not isinstance(node, dict):
            return node
        node.pop("$schema", None)
        if stands_alone and isinstance(node.get("$ref"), str):
            node = {key: value for key, value in node.items() if key in _BESIDE_REF}
        return _bounds(_tuples(node))

    return _hoist(_without_identifiers(_with_pointers(rebuild(schema, change), draft)))


def is_place(name: str) -> bool:
    """Return True if a definition is named by the place that it was copied from."""
    return name.startswith("#/")


def _hoist(root: Schema) -> Schema:
    """Copy to `$defs` the targets of references inside keywords that may be rewritten."""
    refs = {node["$ref"] for _, node in walk(root) if isinstance(node.get("$ref"), str)}
    moved = {ref: resolve(root, ref) for ref in refs if _REWRITTEN & set(ref.split("/"))}
    moved = {ref: target for ref, target in moved.items() if target is not None}
    if not moved:
        return root

    def change(node: Schema) -> Schema:
        if isinstance(node, dict) and node.get("$ref") in moved:
            node["$ref"] = f"#/$defs/{quote(escape(node['$ref']), safe='~')}"
        return node

    return rebuild({**root, "$defs": {**root.get("$defs", {}), **moved}}, change)


def _tuples(node: Node) -> Node:
    if node.get("uniqueItems") is False:
        del node["uniqueItems"]
    rest = node.pop("additionalItems", None)
    if isinstance(node.get("items"), list):
        node["prefixItems"] = node.pop("items")
        if rest is not None:
            node["items"] = rest
    for name, needs in node.pop("dependencies", {}).items():
        key = "dependentRequired" if isinstance(needs, list) else "dependentSchemas"
        needed = [needs] if isinstance(needs, str) else needs
        node[key] = {**node.get(key, {}), name: needed}
    return node


def _bounds(node: Node) -> Node:
    for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(node.get(key), bool):  # as draft 4 has it
            is_exclusive = node.pop(key)
            if is_exclusive and bound in node:
                node[key] = node.pop(bound)
    for key in (*_LOWER, *_UPPER):
        if isinstance(node.get(key), (int, float)):
            is_upper = key in _UPPER
            node[key] = min(node[key], _LARGEST) if is_upper else max(node[key], -_LARGEST)
    return node


@dataclass(frozen=True, slots=True)
class _Resource:
    """A schema with an identifier of its own, and its subschemas by their anchors.

    `place` is its pointer from the root, written as in a URI.
    """

    uri: str
    place: str
    anchors: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Document:
    """A schema's resources, references (with the resource of each) and subschemas."""

    root: Node
    by_uri: dict[str, _Resource | None] = field(default_factory=dict)
    refs: list[tuple[Node, _Resource]] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def pointer(self, ref: str, source: _Resource) -> str:
        """Return the target of a reference: a pointer, anchor or address; itself if outside."""
        address, _, fragment = ref.partition("#")
        resource = self.by_uri.get(urljoin(source.uri, address)) if address else source
        if resource is None:
            return ref
        if fragment in resource.anchors:
            return resource.anchors[fragment]
        newer = re.sub(r"/items/(\d+)", r"/prefixItems/\1", fragment)  # a list of `items`, by now
        is_root = resource.place == "#"
        for way in (fragment, newer):
            pointer = resource.place + way
            found = resolve(self.root, pointer) if not way or way.startswith("/") else None
            # What is no subschema's place may refer on, and those references are not rewritten.
            if found is not None and (is_root or id(found) in self.seen or found in (True, False)):
                return pointer
        return ref if is_root else f"{resource.uri}#{fragment}"


def _with_pointers(root: Schema, draft: Draft) -> Schema:
    """Rewrite every reference within the schema as a pointer from its root.

    A reference is relative to the nearest `$id` around it, `#/…` and `#anchor` too (JSON Schema
    2020-12, 8.2 and 9.2). One that finds nothing there becomes an address that leads out.
    """
    if not isinstance(root, dict):
        return root
    document = _Document(root)
    around: list[tuple[str, _Resource]] = []
    for at, node in walk(root):
        document.seen.add(id(node))
        while around and not at.startswith(f"{around[-1][0]}/"):
            around.pop()
        place = quote(at, safe="#/~")
        name, anchor = _names_of(node, draft, is_root=at == "#")
        if name or not around:
            inner = _Resource(urljoin(around[-1][1].uri, name) if around else name, place)
            is_taken = inner.uri in document.by_uri  # and then it is ambiguous
            document.by_uri[inner.uri] = None if is_taken else inner
            around.append((at, inner))
        resource = around[-1][1]
        for each in (anchor, node.get("$anchor"), node.get("$dynamicAnchor")):
            if isinstance(each, str) and each and not each.startswith("/"):
                resource.anchors.setdefault(each, place)
        if isinstance(node.get("$ref"), str):
            document.refs.append((node, resource))
    for node, resource in document.refs:
        node["$ref"] = document.pointer(node["$ref"], resource)
    return root


def _names_of(node: Node, draft: Draft, *, is_root: bool) -> tuple[str, str]:
    """Return the address and the anchor that an identifier gives; each empty if it gives none."""
    name = node.get("id" if draft is Draft.D4 else "$id")
    if not isinstance(name, str) or (draft in _REFS_STAND_ALONE and "$ref" in node and not is_root):
        return "", ""
    address, _, anchor = name.partition("#")
    return address, anchor


def _without_identifiers(root: Schema) -> Schema:
    """Remove identifiers: every reference is a pointer from the root now."""

    def change(node: Schema) -> Schema:
        if isinstance(node, dict):
            for key in ("$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"):
                node.pop(key, None)
        return node

    return rebuild(root, change)
