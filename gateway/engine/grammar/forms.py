"""The forms of a JSON Schema that may be compiled, tightest first, and what each leaves out."""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from gateway.engine.grammar.drafts import NEWEST, check_draft, modernize
from gateway.engine.grammar.enforcement import Held, Leaves, drop_unenforceable
from gateway.engine.grammar.obstacles import (
    NO_ANSWER,
    STEPS,
    allows_nothing,
    dead_ends,
    is_contradiction,
    is_too_large,
    keep_own_keywords,
    suspects,
    why,
    without,
)
from gateway.engine.grammar.patterns import quotable, repetitions
from gateway.engine.grammar.references import check_path
from gateway.engine.grammar.schemas import (
    Node,
    Schema,
    can_end,
    parse_schema,
    rebuild,
    refusal,
    resolve,
    walk,
)
from gateway.engine.grammar.shaping import Shape, close_objects, shape_schema
from gateway.engine.grammar.translation import translate
from gateway.engine.grammar.trial import BUSY_S, DiedCompiling
from gateway.errors import BadRequest, Unavailable

T = TypeVar("T")

COMPACT: Final[Mapping[str, Any]] = {"whitespace_flexible": False}
_CONDITIONS: Final = 6
_ROUNDS: Final = 3
_REPETITIONS: Final = 20_000  # in one pattern, beyond which it is tried alone
_SPACE: Final = r"[ \t\n\r]|\\[tnr]|\\x(?:20|0[9AaDd])"
_WHITE_SPACE: Final = re.compile(  # a regex of what JSON has as white space, and of nothing else
    rf"(?:{_SPACE}|\[(?:{_SPACE})+\]|[*+?|()]|\(\?:|\{{[0-9]{{1,4}}(?:,[0-9]{{0,4}})?\}})*"
)
_WHITE_SPACE_CHARS: Final = 64
_ESCAPES: Final = 'nrbtf\\"'
_CONTROLS: Final = re.compile(r"\\u00[01]|\x7f")


@dataclass(frozen=True, slots=True)
class Read:
    """A caller's schema in draft 2020-12, and the options that it sets for its form.

    `is_older` is True if the caller wrote it in an older draft.
    """

    schema: Schema
    options: Mapping[str, Any]
    is_older: bool


@dataclass(slots=True)
class Allowance:
    """How long the forms of one schema may take together.

    Of the processor's time, as this thread has it, which is the schema's own cost: no form is begun
    afterwards. And by the clock on the wall, which other work may take.
    """

    processor_s: float
    wall_s: float
    processor: Callable[[], float] = time.thread_time
    wall: Callable[[], float] = time.monotonic
    _since: tuple[float, float] = field(init=False)

    def __post_init__(self) -> None:
        self._since = self.processor(), self.wall()

    def is_spent(self) -> bool:
        """Return True if no more is to be tried. Raises Unavailable if the machine is too busy."""
        processor, wall = self._since
        if self.processor() - processor > self.processor_s:
            return True
        if self.wall() - wall > self.wall_s:
            raise Unavailable(
                "The machine is too busy to compile the JSON Schema; ask again.",
                retry_after_s=BUSY_S,
            )
        return False


def read_schema(source: str, *, max_bytes: int, max_depth: int, max_path: int) -> Read:
    """Read a JSON Schema and check it against its draft's own schema.

    Raises BadRequest for what is none, leads too far, or has no finite value.
    """
    schema = parse_schema(source, max_bytes=max_bytes, max_depth=max_depth)
    check_path(schema, max_path)
    options = _options(schema)
    draft = check_draft(schema)
    plain = modernize(schema, draft) if isinstance(schema, dict) else {} if schema else False
    if plain is False:
        raise refusal("The JSON Schema `false` allows no answer.")
    for place, node in walk(plain):
        ref = node.get("$ref", "")
        if ref.startswith("#") and resolve(plain, ref) is None:
            raise refusal(f"The JSON Schema keyword `$ref` at {place} leads nowhere: `{ref}`.")
    if not can_end(plain):
        raise refusal("The JSON Schema allows no finite answer: something required is impossible.")
    return Read(plain, options, draft is not NEWEST)


def _options(schema: Schema) -> Mapping[str, Any]:
    """Return llguidance's own options in the schema: those of white space, none that change what
    else is written.
    """
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
    allowed = {"whitespace_flexible": _is_boolean, "whitespace_pattern": _is_white_space}
    if not isinstance(options, dict) or not options.keys() <= allowed.keys():
        raise refusal(
            f"The JSON Schema keyword `x-guidance` may have {' and '.join(allowed)} only."
        )
    for name, value in options.items():
        if not allowed[name](value):
            raise refusal(
                f"The JSON Schema keyword `x-guidance` has a `{name}` that cannot be taken: "
                "whitespace_flexible is a boolean, whitespace_pattern a regex of JSON's white "
                f"space, of at most {_WHITE_SPACE_CHARS} characters."
            )
    return {**COMPACT, **options}  # or a model may write spaces for ever


def _is_boolean(value: object) -> bool:
    return isinstance(value, bool)


def _is_white_space(value: object) -> bool:
    is_short = isinstance(value, str) and len(value) <= _WHITE_SPACE_CHARS
    return is_short and _WHITE_SPACE.fullmatch(str(value)) is not None


def first_form(read: Read, shape: Shape) -> Held:
    """Return the tightest form."""
    return next(_forms(read, shape, _translate(read, _CONDITIONS), frozenset()))


def _translate(read: Read, conditions: int, *, is_plain: bool = False) -> Schema:
    schema = translate(read.schema, conditions=conditions, is_plain=is_plain)
    if schema is False:
        raise refusal("The JSON Schema allows no finite answer: it forbids every value.")
    return schema


def form_that_compiles(
    read: Read, shape: Shape, compiled: Callable[[Schema], T], allowance: Allowance
) -> tuple[Held, T]:
    """Compile the tightest form possible, leaving out what keeps all others from compiling.

    `compiled` raises BadRequest with the compiler's words. Raises BadRequest with our own words
    when nothing compiles, or not within its allowance, and Unavailable on a machine too busy.
    """
    problem = ""

    def attempt(schema: Schema, leaves: Leaves) -> tuple[Held, T] | None:
        nonlocal problem
        for form in _forms(read, shape, schema, leaves):
            if allowance.is_spent():
                raise refusal("The JSON Schema takes too long to compile: simplify it.")
            try:
                return form, compiled(form.schema)
            except DiedCompiling:
                raise
            except BadRequest as error:
                problem = error.message
        return None

    tried: list[Schema] = []
    for conditions in (_CONDITIONS, 0):
        schema = _translate(read, conditions)
        if schema in tried:
            continue
        tried.append(schema)
        leaves: Leaves = frozenset()
        for _ in range(_ROUNDS):
            if (found := attempt(schema, leaves)) is not None:
                return found
            more = keep_own_keywords(
                read.schema, schema, suspects(schema, problem, compiled, allowance.is_spent)
            )
            if more <= leaves:
                break
            leaves |= more
    if is_too_large(problem) or allows_nothing(read.schema):
        raise refusal(why(read.schema, problem))
    first = problem
    for is_plain in (False, True):
        schema = _translate(read, 0, is_plain=is_plain)
        dead = dead_ends(schema)
        schema, own = without(schema, dead), without(read.schema, dead)
        if schema is False:
            raise refusal(NO_ANSWER)
        leaves = frozenset()
        if schema not in tried and (found := attempt(schema, leaves)) is not None:
            return found
        for step in STEPS:
            if is_contradiction(problem) and step is not STEPS[0]:
                break  # what is looser than the schema has no answer, so nor has that
            more = step(schema) | suspects(schema, problem, compiled, allowance.is_spent)
            more = keep_own_keywords(own, schema, more)
            if more <= leaves:
                continue
            leaves |= more
            if (found := attempt(schema, leaves)) is not None:
                return found
    raise refusal(why(read.schema, first))


def _forms(read: Read, shape: Shape, schema: Schema, leaves: Leaves) -> Iterator[Held]:
    """Yield the schema tightened for a small model, then as it came."""
    tighten = close_objects if shape.closed else None
    tight = drop_unenforceable(schema, tighten=tighten, leaves=leaves, is_older=read.is_older)
    narrow = shape_schema(tight.schema, shape)
    yield Held(narrow, tight.unenforced)
    loose = drop_unenforceable(schema, leaves=leaves, is_older=read.is_older)
    if loose.schema != narrow:
        yield loose


def to_llguidance(schema: Schema, options: Mapping[str, Any] = COMPACT) -> Node:
    """Write a schema as llguidance reads it, with the options of its form.

    A name could be spelled with `\\u` in many ways, and so stand beside its own declaration:
    only what can't be written otherwise, control characters, is spelled so, and then no object
    with declared names has others.
    """
    text = json.dumps(schema)
    if not _CONTROLS.search(text):
        options = {**options, "json_allowed_escapes": _ESCAPES}
    else:
        schema = rebuild(schema, _without_others)
    if "[^" in text:
        schema = rebuild(schema, _quotable)
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
    """List the string schemas whose patterns repeat so much that they may be too large."""
    patterns = dict.fromkeys(
        pattern
        for _, node in walk(schema)
        for pattern in (node.get("pattern"), *node.get("patternProperties", ()))
        if isinstance(pattern, str) and repetitions(pattern) > _REPETITIONS
    )
    return [{"type": "string", "pattern": pattern} for pattern in patterns]


def of_function(function: str, error: BadRequest) -> BadRequest:
    """Name, in a refusal, the function whose parameters it is about, if there is one."""
    if not function:
        return error
    message = f"The parameters of '{function}': {error.message}"
    return BadRequest(message, part="tools", code=error.code)


def check_strict(form: Held) -> None:
    """Raise BadRequest for a form that leaves something out, naming the keyword and its place."""
    if form.unenforced:
        pointer = form.unenforced[0]
        place, _, keyword = pointer.rpartition("/")
        raise refusal(
            f"The JSON Schema keyword `{keyword}` at {place} cannot be enforced here, and 'strict' "
            "asks for all of the schema."
        )
