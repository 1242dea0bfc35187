"""The forms of a JSON Schema that may be compiled, tightest first, and what each leaves out."""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from gateway.engine.grammar.drafts import NEWEST, check_draft, modern
from gateway.engine.grammar.enforcement import Held, held, translated
from gateway.engine.grammar.patterns import quotable, repetitions
from gateway.engine.grammar.references import check_path
from gateway.engine.grammar.schemas import (
    Node,
    Schema,
    can_end,
    parse_schema,
    rebuilt,
    refused,
    resolve,
    walk,
)
from gateway.engine.grammar.shaping import Shape, closed, shaped
from gateway.engine.grammar.trial import DiedCompiling
from gateway.errors import BadRequest

T = TypeVar("T")

COMPACT: Final[Mapping[str, Any]] = {"whitespace_flexible": False}
_CONDITIONS: Final = 6
_ROUNDS: Final = 3
BUDGET_S: Final = 4.0  # for all forms together, after which no other is begun
_REPETITIONS: Final = 20_000  # in one pattern, beyond which it is tried alone
_PATTERNS: Final = 64  # that are compiled alone, to see which is wrong; all others may be
_OPTIONS: Final = frozenset(
    {"whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator"}
)
_ESCAPES: Final = 'nrbtf\\"'
_CONTROLS: Final = re.compile(r"\\u00[01]|\x7f")
_BOUNDS: Final = (
    *(("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")),
    *(("minimum", "maximum"), ("minimum", "exclusiveMaximum"), ("exclusiveMinimum", "maximum")),
)


@dataclass(frozen=True, slots=True)
class Read:
    """A caller's schema in draft 2020-12's words, and the options it has for its form.

    `is_older` tells that the caller wrote it in an older draft.
    """

    schema: Schema
    options: Mapping[str, Any]
    is_older: bool


def read_schema(source: str, *, max_bytes: int, max_depth: int, max_path: int) -> Read:
    """Read a JSON Schema and check it against its draft's own schema.

    Raises BadRequest for what is none, leads too far, or has no finite value.
    """
    schema = parse_schema(source, max_bytes=max_bytes, max_depth=max_depth)
    check_path(schema, max_path)
    options = _options(schema)
    draft = check_draft(schema)
    plain = modern(schema, draft) if isinstance(schema, dict) else {} if schema else False
    if plain is False:
        raise refused("The JSON Schema `false` allows no answer.")
    for place, node in walk(plain):
        ref = node.get("$ref", "")
        if ref.startswith("#") and resolve(plain, ref) is None:
            raise refused(f"The JSON Schema keyword `$ref` at {place} leads nowhere: `{ref}`.")
    if not can_end(plain):
        raise refused("The JSON Schema allows no finite answer: something required is impossible.")
    return Read(plain, options, draft is not NEWEST)


def _options(schema: Schema) -> Mapping[str, Any]:
    """Read llguidance's own options from the schema: those of form, none that loosen it."""
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
    if not isinstance(options, dict) or not options.keys() <= _OPTIONS:
        raise refused(
            f"The JSON Schema keyword `x-guidance` may have {', '.join(sorted(_OPTIONS))} only."
        )
    return {**COMPACT, **options}  # or a model may write spaces for ever


def first_form(read: Read, shape: Shape) -> Held:
    """Return the tightest form."""
    return next(_forms(read, shape, _translated(read, _CONDITIONS), frozenset()))


def _translated(read: Read, conditions: int) -> Schema:
    schema = translated(read.schema, conditions=conditions)
    if schema is False:
        raise refused("The JSON Schema allows no finite answer: it forbids every value.")
    return schema


def form_that_compiles(
    read: Read, shape: Shape, compiled: Callable[[Schema], T], *, until: float | None = None
) -> tuple[Held, T]:
    """Compile the tightest form that can be, leaving out what keeps all others from it.

    `compiled` raises BadRequest with the compiler's words. Raises BadRequest in ours when
    nothing compiles, or not by `until` (of the monotonic clock), after which no other is begun.
    """
    problem, leaves = "", frozenset[str]()
    until = until or time.monotonic() + BUDGET_S
    tried: Schema = None
    for conditions in (_CONDITIONS, 0):
        schema = _translated(read, conditions)
        if schema == tried:
            break
        tried = schema
        for _ in range(_ROUNDS):
            for form in _forms(read, shape, schema, leaves):
                if time.monotonic() > until:
                    raise refused("The JSON Schema takes too long to compile: simplify it.")
                try:
                    return form, compiled(form.schema)
                except DiedCompiling:
                    raise
                except BadRequest as error:
                    problem = error.message
            suspects = _suspects(schema, problem, compiled, until) - leaves
            if not suspects:
                break
            leaves |= suspects
    raise refused(_why(read.schema, problem))


def _forms(read: Read, shape: Shape, schema: Schema, leaves: frozenset[str]) -> Iterator[Held]:
    """Give the schema tightened for a small model, then as it came."""
    tighten = closed if shape.closed else None
    tight = held(schema, tighten=tighten, leaves=leaves, is_older=read.is_older)
    narrow = shaped(tight.schema, shape)
    yield Held(narrow, tight.unenforced)
    loose = held(schema, leaves=leaves, is_older=read.is_older)
    if loose.schema != narrow:
        yield loose


def guided(schema: Schema, options: Mapping[str, Any] = COMPACT) -> Node:
    """Write a schema as llguidance reads it, with the options of its form.

    A name could be spelled with `\\u` in many ways, and so stand beside its own declaration:
    only what can't be written otherwise, control characters, is spelled so, and then no object
    with declared names has others.
    """
    text = json.dumps(schema)
    if not _CONTROLS.search(text):
        options = {**options, "json_allowed_escapes": _ESCAPES}
    else:
        schema = rebuilt(schema, _without_others)
    if "[^" in text:
        schema = rebuilt(schema, _quotable)
    return {**schema, "x-guidance": options}


def _without_others(node: Schema) -> Schema:
    if isinstance(node, dict) and node.get("properties"):
        node["additionalProperties"] = False
    return node


def _quotable(node: Schema) -> Schema:
    if isinstance(node, dict) and isinstance(node.get("pattern"), str):
        node["pattern"] = quotable(node["pattern"])
    if isinstance(node, dict) and "patternProperties" in node:
        own = node["patternProperties"]
        node["patternProperties"] = {quotable(pattern): own[pattern] for pattern in own}
    return node


def repeats_much(schema: Schema) -> list[Node]:
    """List the schemas of strings whose patterns repeat so much that they may be too large."""
    patterns = dict.fromkeys(
        pattern
        for _, node in walk(schema)
        for pattern in (node.get("pattern"), *node.get("patternProperties", ()))
        if isinstance(pattern, str) and repetitions(pattern) > _REPETITIONS
    )
    return [{"type": "string", "pattern": pattern} for pattern in patterns]


def _suspects(
    schema: Schema, found: str, compiled: Callable[[Schema], object], until: float
) -> frozenset[str]:
    """Guess, by what the compiler said, which keywords it could not take; in time, or too many."""
    places = set()
    if "egex" in found or "look" in found or "expressions" in found:
        broken: dict[str, bool] = {}

        def is_broken(pattern: str) -> bool:
            is_late = len(broken) >= _PATTERNS or time.monotonic() > until
            if is_late and pattern not in broken:
                return True
            if pattern not in broken:
                try:
                    compiled({"type": "string", "pattern": pattern})
                    broken[pattern] = False
                except BadRequest:
                    broken[pattern] = True
            return broken[pattern]

        for place, node in walk(schema):
            if isinstance(node.get("pattern"), str) and is_broken(node["pattern"]):
                places.add(f"{place}/pattern")
            if any(map(is_broken, node.get("patternProperties", ()))):
                places.add(f"{place}/patternProperties")
    if "patternProperty" in found:
        places |= {
            f"{place}/patternProperties"
            for place, node in walk(schema)
            if len(node.get("patternProperties", ())) > 1
        }
    if "circular" in found or "stack level" in found:
        for place, node in walk(schema):
            if "$ref" in node:
                beside = ("properties", "allOf", "anyOf", "oneOf", "required")
                places |= {f"{place}/{key}" for key in beside if key in node}
                places |= {
                    f"{place}/allOf/{i}/$ref"
                    for i, each in enumerate(node.get("allOf", ()))
                    if isinstance(each, dict) and "$ref" in each
                }
    return frozenset(places)


def _why(schema: Schema, found: str) -> str:
    """Say why nothing compiles, in our words."""
    if "nsatisfiable" in found or "no answer" in found:
        for place, node in walk(schema):
            for least, most in _BOUNDS:
                if least in node and most in node and node[least] > node[most]:
                    return (
                        f"The JSON Schema keyword `{least}` at {place} is above `{most}`: "
                        f"{node[least]} and {node[most]} leave no value."
                    )
            if node.get("enum") == []:
                return f"The JSON Schema keyword `enum` at {place} is empty: it allows no value."
        return "The JSON Schema allows no answer: what it requires contradicts itself."
    if any(word in found for word in ("max is", "too ", "limit", "level exceeded", "Unable")):
        return (
            "The JSON Schema is too wide or too deep to hold an answer to: it has too many "
            "properties, alternatives or repetitions in one place."
        )
    return "The JSON Schema cannot be held by a grammar as it is combined; write it simpler."


def of_function(function: str, error: BadRequest) -> BadRequest:
    """Say whose parameters a refusal is about, if a function's."""
    if not function:
        return error
    message = f"The parameters of '{function}': {error.message}"
    return BadRequest(message, param="tools", code=error.code)


def check_strict(form: Held) -> None:
    """Refuse a form that leaves something out, naming the keyword and its place."""
    if form.unenforced:
        pointer = form.unenforced[0]
        place, _, keyword = pointer.rpartition("/")
        raise refused(
            f"The JSON Schema keyword `{keyword}` at {place} cannot be enforced here, and 'strict' "
            "asks for all of the schema."
        )
