"""A JSON Schema of any draft, checked by its own and said in the words of draft 2020-12."""

import re
from collections.abc import Iterator
from enum import Enum
from functools import cache
from typing import Any, Final
from urllib.parse import quote, urljoin

import jsonschema_rs
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

from gateway.engine.grammar.schemas import Node, Schema, escaped, rebuilt, refused, resolve, walk


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
_LARGEST: Final = 2**53  # beyond it neighbouring integers are one double, and llguidance has those
_UPPER: Final = ("maximum", "exclusiveMaximum")
_LOWER: Final = ("minimum", "exclusiveMinimum")


def draft_of(schema: Schema) -> Draft:
    """Return the draft that `$schema` names; the newest where it names none that is known."""
    name = schema.get("$schema") if isinstance(schema, dict) else None
    if not isinstance(name, str):
        return NEWEST
    return _BY_NAME.get(name.partition("://")[2].rstrip("#"), NEWEST)


def check_draft(schema: Schema) -> Draft:
    """Check a schema against its draft's own schema. Raises BadRequest naming keyword and place."""
    draft = draft_of(schema)
    found = next(_own_schema(draft).iter_errors(schema), None)
    if found is not None:
        path = [escaped(str(part)) for part in found.instance_path] or [""]
        raise refused(
            f"The JSON Schema is not valid: `{path[-1]}` at {'/'.join(['#', *path])} is not as "
            f"{draft.value} has it."
        )
    return draft


@cache
def _own_schema(draft: Draft) -> Any:
    # Formats are not looked at: `pattern` is ECMA's, which few libraries' own dialect is.
    return jsonschema_rs.validator_for(REGISTRY.contents(draft.value), validate_formats=False)


def modern(schema: Schema, draft: Draft = NEWEST) -> Schema:
    """Say in draft 2020-12 what older drafts said otherwise, and leave out what says nothing.

    A list of `items` becomes `prefixItems`, `dependencies` are split, references become
    pointers from the root (those that lead out of the schema stay as they are), and bounds
    beyond 2^53 are drawn in to it, since the compilers count in doubles.
    """
    stands_alone = draft in _REFS_STAND_ALONE

    def change(node: Schema) -> Schema:
        if not isinstance(node, dict):
            return node
        node.pop("$schema", None)
        if stands_alone and isinstance(node.get("$ref"), str):
            node = {key: value for key, value in node.items() if key in _BESIDE_REF}
        return _bounds(_tuples(node))

    return _hoisted(_without_identifiers(_with_pointers(rebuilt(schema, change))))


def is_place(name: str) -> bool:
    """Tell whether a definition is named by the place it was copied from."""
    return name.startswith("#/")


def _hoisted(root: Schema) -> Schema:
    """Copy to `$defs` what references lead to inside keywords that may be written otherwise."""
    refs = {node["$ref"] for _, node in walk(root) if isinstance(node.get("$ref"), str)}
    moved = {ref: resolve(root, ref) for ref in refs if _REWRITTEN & set(ref.split("/"))}
    moved = {ref: target for ref, target in moved.items() if target is not None}
    if not moved:
        return root

    def change(node: Schema) -> Schema:
        if isinstance(node, dict) and node.get("$ref") in moved:
            node["$ref"] = f"#/$defs/{quote(escaped(node['$ref']), safe='~')}"
        return node

    return rebuilt({**root, "$defs": {**root.get("$defs", {}), **moved}}, change)


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


def _with_pointers(root: Schema) -> Schema:
    """Write every reference within the schema as a pointer from its root."""
    if not isinstance(root, dict):
        return root
    known = dict(_identifiers(root))
    if all(_is_plain(root, node) for _, node in walk(root)):
        return root
    base = _identifier(root)

    def change(node: Schema) -> Schema:
        if isinstance(node, dict) and isinstance(node.get("$ref"), str):
            node["$ref"] = _pointer(root, node["$ref"], base, known)
        return node

    return rebuilt(root, change)


def _is_plain(root: Node, node: Node) -> bool:
    ref = node.get("$ref", "#")
    return not isinstance(ref, str) or resolve(root, ref) is not None


def _pointer(root: Node, ref: str, base: str, known: dict[str, str]) -> str:
    """Find where a reference leads: by pointer, anchor or identifier; itself if it leads out."""
    if resolve(root, ref) is not None:
        return ref
    if ref.startswith("#/"):
        newer = re.sub(r"/items/(\d+)", r"/prefixItems/\1", ref)  # a list of `items`, by now
        return newer if resolve(root, newer) is not None else ref
    whole = urljoin(base, ref)
    address, _, fragment = whole.partition("#")
    for name in (ref, whole):
        if name in known:
            return known[name]
    start = known.get(address) or ("#" if address == base.partition("#")[0] else None)
    if start is None or (fragment and not fragment.startswith("/")):
        return ref
    return start + fragment


def _identifiers(root: Node) -> Iterator[tuple[str, str]]:
    """List what references may call subschemas by, with their pointers."""
    base = _identifier(root)
    for at, node in walk(root):
        place = quote(at, safe="#/~")
        if anchor := node.get("$anchor"):
            yield f"#{anchor}", place
        if place != "#" and (name := _identifier(node)):
            yield name, place
            yield urljoin(base, name).rstrip("#"), place


def _identifier(node: Node) -> str:
    name = node.get("$id", node.get("id"))
    return name if isinstance(name, str) else ""


def _without_identifiers(root: Schema) -> Schema:
    """Leave out identifiers: every reference is a pointer from the root now."""

    def change(node: Schema) -> Schema:
        if isinstance(node, dict):
            for key in ("$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"):
                node.pop(key, None)
        return node

    return rebuilt(root, change)
