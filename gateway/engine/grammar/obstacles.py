"""What keeps a JSON Schema from compiling: keywords to leave out, and words for a refusal."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final
from urllib.parse import quote

from gateway.engine.grammar.disjoint import Proofs
from gateway.engine.grammar.enforcement import Leaves, find_live
from gateway.engine.grammar.schemas import NOTES, Node, Schema, rebuild, resolve, walk
from gateway.errors import BadRequest

_PATTERNS: Final = 64  # that are compiled alone, to see which is wrong; all others may be
_IN_PLACE: Final = ("allOf", "anyOf", "oneOf")
_APPLIED: Final = ("$ref", *_IN_PLACE)
_BOUNDS: Final = (
    *(("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")),
    *(("minimum", "maximum"), ("minimum", "exclusiveMaximum"), ("exclusiveMinimum", "maximum")),
)


# ── What to leave out ────────────────────────────────────────────────────────────────────────


def suspects(
    schema: Schema,
    found: str,
    compiled: Callable[[Schema], object],
    is_late: Callable[[], bool],
) -> Leaves:
    """Guess which keywords the compiler could not take; if it is late, too many."""
    leaves = set[tuple[int, str]]()
    if "egex" in found or "look" in found or "expressions" in found:
        broken: dict[str, bool] = {}

        def is_broken(pattern: str) -> bool:
            if pattern not in broken:
                if len(broken) >= _PATTERNS or is_late():
                    return True
                try:
                    compiled({"type": "string", "pattern": pattern})
                    broken[pattern] = False
                except BadRequest:
                    broken[pattern] = True
            return broken[pattern]

        for _, node in walk(schema):
            if isinstance(node.get("pattern"), str) and is_broken(node["pattern"]):
                leaves.add((id(node), "pattern"))
            if any(map(is_broken, node.get("patternProperties", ()))):
                leaves.add((id(node), "patternProperties"))
    if "patternProperty" in found:
        leaves |= {
            (id(node), "patternProperties")
            for _, node in walk(schema)
            if len(node.get("patternProperties", ())) > 1
        }
    if "circular" in found or "stack level" in found:
        for _, node in walk(schema):
            if "$ref" in node:
                siblings = ("properties", "allOf", "anyOf", "oneOf", "required")
                leaves |= {(id(node), key) for key in siblings if key in node}
                leaves |= {
                    (id(each), "$ref")
                    for each in node.get("allOf", ())
                    if isinstance(each, dict) and "$ref" in each
                }
    return frozenset(leaves)


def _spoken_of_together(schema: Schema) -> Iterator[Node]:
    """Yield the subschemas that constrain a value which another subschema constrains too."""
    todo, seen = list[Any](), set[int]()
    for _, node in walk(schema):
        siblings = node.keys() - NOTES
        if siblings & {*_IN_PLACE} or ("$ref" in siblings and len(siblings) > 1):
            todo.append(node)
    while todo:
        node = todo.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        todo += [each for key in _IN_PLACE for each in node.get(key, ())]
        if isinstance(node.get("$ref"), str):
            todo.append(resolve(schema, node["$ref"]))


def _counts(schema: Schema) -> Leaves:
    keys = ("minProperties", "maxProperties")
    together = _spoken_of_together(schema)
    return frozenset((id(node), key) for node in together for key in keys if key in node)


def _names(schema: Schema) -> Leaves:
    """List keywords that restrict an object's names in several places, or exclude alternatives."""
    together = _spoken_of_together(schema)
    return frozenset(
        (id(node), key)
        for node in together
        for key in ("patternProperties", "oneOf")
        if key in node and (key != "oneOf" or len(node.keys() - NOTES) > 1)
    )


def _circles(schema: Schema) -> Leaves:
    """List the siblings of references, and references in places that have siblings."""
    leaves = set[tuple[int, str]]()
    for _, node in walk(schema):
        own = node.keys() - NOTES
        if "$ref" in own:
            leaves |= {(id(node), key) for key in own if key != "$ref"}
        if len(own) > 1 or len(node.get("allOf", ())) > 1:
            leaves |= {(id(each), "$ref") for each in _in_place(node) if "$ref" in each}
    return frozenset(leaves)


def _in_place(node: Node) -> Iterator[Node]:
    for key in _IN_PLACE:
        for each in node.get(key, ()):
            if isinstance(each, dict):
                yield each
                yield from _in_place(each)


def _list_applied(schema: Schema) -> Leaves:
    """List the keywords that apply other subschemas next to further keywords."""
    return frozenset(
        (id(node), key)
        for _, node in walk(schema)
        for key in _APPLIED
        if key in node and len(node.keys() - NOTES) > 1
    )


STEPS: Final[Sequence[Callable[[Schema], Leaves]]] = (_counts, _names, _circles, _list_applied)
"""What is left out when no form compiles: each of these besides those before it."""


def keep_own_keywords(own: Schema, schema: Schema, leaves: Leaves) -> Leaves:
    """Keep those keywords of a translated schema that are the caller's `own`, and no more.

    Another keyword may stand for one of the caller's that would then not be named.
    """
    found = set[tuple[int, str]]()
    for place, node in walk(schema):
        keys = [key for key in node if (id(node), key) in leaves]
        theirs = resolve(own, quote(place, safe="#/~")) if keys else None
        if isinstance(theirs, dict):
            found |= {(id(node), key) for key in keys if _is_same(key, node, theirs)}
    return frozenset(found)


def _is_same(key: str, node: Node, own: Node) -> bool:
    if key not in own:
        return False
    rest = "additionalProperties"
    if key in ("properties", "patternProperties") and (rest in node) != (rest in own):
        return False
    one, other = node[key], own[key]
    if isinstance(one, list) and key in _IN_PLACE:
        return len(one) == len(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            (one[name] is False) == (other[name] is False) for name in one
        )
    return bool(one == other)


def dead_ends(schema: Schema) -> frozenset[str]:
    """Find the references whose targets no value fits.

    llguidance 1.9.1 refuses a schema with one, whatever may be chosen instead.
    """
    proofs = Proofs(schema)
    refs = {node["$ref"] for _, node in walk(schema) if isinstance(node.get("$ref"), str)}
    return frozenset(ref for ref in refs if proofs.are_disjoint(({"$ref": ref},), ()))


def without(schema: Schema, refs: frozenset[str]) -> Schema:
    """Replace these references with `false`."""

    def change(node: Schema) -> Schema:
        return False if isinstance(node, dict) and node.get("$ref") in refs else node

    return rebuild(schema, change) if refs else schema


# ── Words for a refusal ───────────────────────────────────────────────────────────────────────


NO_ANSWER: Final = "The JSON Schema allows no answer: what it requires contradicts itself."


def is_contradiction(found: str) -> bool:
    """Return True if the compiler found that no answer exists."""
    return "nsatisfiable" in found or "no answer" in found


def is_too_large(found: str) -> bool:
    """Return True if the compiler gave up over the size of something."""
    return any(word in found for word in ("max is", "too ", "limit", "level exceeded", "Unable"))


def allows_nothing(schema: Schema) -> bool:
    """Prove that no value fits a schema as it was written."""
    return Proofs(schema).are_disjoint((schema,), ())


def why(schema: Schema, found: str) -> str:
    """Return the reason why nothing compiles, in our words."""
    if allows_nothing(schema):
        reached = find_live(schema)
        for place, node in walk(schema):
            if id(node) not in reached:
                continue
            for least, most in _BOUNDS:
                if least in node and most in node and node[least] > node[most]:
                    return (
                        f"The JSON Schema keyword `{least}` at {place} is above `{most}`: "
                        f"{node[least]} and {node[most]} leave no value."
                    )
            if node.get("enum") == []:
                return f"The JSON Schema keyword `enum` at {place} is empty: it allows no value."
        return NO_ANSWER
    if is_contradiction(found):
        return (
            "The JSON Schema cannot be held by a grammar: as far as one can follow it, what it "
            "requires contradicts itself; write it simpler."
        )
    if is_too_large(found):
        return (
            "The JSON Schema is too wide or too deep to hold an answer to: it has too many "
            "properties, alternatives or repetitions in one place."
        )
    return "The JSON Schema cannot be held by a grammar as it is combined; write it simpler."
