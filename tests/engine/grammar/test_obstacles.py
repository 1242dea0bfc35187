"""A schema of which some combination does not compile is held without it, and that is named."""

import contextlib
import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import jsonschema_rs
import pytest

from gateway.errors import BadRequest
from tests.engine.grammar.drawn_rows import OPEN, answer, compiled, ids

TEXT = {"type": "string"}
WHOLE = {"type": "integer"}
A: dict[str, Any] = {"patternProperties": {"^a": TEXT}}
B: dict[str, Any] = {"patternProperties": {"b": TEXT}}
LOOP = {"type": "object", "properties": {"a": {"$ref": "#/$defs/R"}}}


@pytest.mark.parametrize(
    ("schema", "named", "said", "broken"),
    [
        ({"type": "object", **A, "allOf": [B]}, "#/allOf/0/patternProperties", "{}", "[]"),
        ({"$ref": "#/$defs/R", **A, "$defs": {"R": B}}, "#/$defs/R/patternProperties", "{}", None),
        (
            {"type": "object", "minProperties": 1, "anyOf": [{"properties": {"a": TEXT}}]},
            "#/minProperties",
            '{"a":"b"}',
            '{"a":1}',
        ),
        (
            {
                "$ref": "#/$defs/R",
                "$defs": {"R": {"type": "object", "patternProperties": {"^a": {"$ref": "#"}}}},
                "patternProperties": {"^b": {"$ref": "#"}},
                "minProperties": 1,
            },
            "#/patternProperties",
            '{"a":{}}',
            "1",
        ),
        (
            {
                "minProperties": 1,
                "not": {"required": ["a"]},
                "unevaluatedProperties": WHOLE,
                "anyOf": [{"properties": {"b": {}}}],
            },
            "#/minProperties",
            '{"b":1}',
            '{"a":1}',
        ),
    ],
)
def test_what_does_not_compile_as_it_is_combined_is_named_and_the_rest_is_held(
    schema: Any, named: str, said: str, broken: str | None
) -> None:
    """With `strict` it is refused by its name."""
    grammar = compiled(schema, OPEN)
    assert named in grammar.unenforced
    assert grammar.matcher(ids(said)).may_end
    assert broken is None or not grammar.matcher(ids(broken)).may_end
    with pytest.raises(BadRequest, match="'strict' asks for all of the schema"):
        compiled(schema, OPEN, strict=True)


def test_a_reference_that_no_value_fits_is_a_way_that_is_not_taken() -> None:
    """The others remain, and nothing is left out."""
    never = {"anyOf": [{"$ref": "#/$defs/N"}, TEXT], "$defs": {"N": {"allOf": [False, TEXT]}}}
    assert compiled(never, OPEN).unenforced == ()


def test_no_answer_is_said_of_what_has_none_and_blames_no_other_place() -> None:
    """A definition that nothing leads to has nothing to do with it."""
    unused = {"minProperties": 2, "maxProperties": 1}
    none = {"$defs": {"U": unused}, "allOf": [{"const": 1}, {"const": 2}]}
    with pytest.raises(BadRequest, match="allows no answer: what it requires contradicts itself"):
        compiled(none, OPEN)


def test_a_keyword_in_other_words_is_never_left_out_under_anothers_name() -> None:
    """`not` becomes an `allOf` beside the caller's own: that goes, and so must be named."""
    looped = {"$ref": "#/$defs/R", "not": {"required": ["a"]}, "properties": {"b": TEXT}}
    grammar = compiled({**looped, "$defs": {"R": LOOP}}, OPEN)
    assert "#/allOf" not in grammar.unenforced
    is_held = not grammar.matcher(ids('{"a":{}}')).may_end
    assert is_held or "#/not" in grammar.unenforced


class Drawn:
    """Small schemas of the keywords that are hard to combine."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._refs = ["#/$defs/S"]

    def root(self) -> dict[str, Any]:
        definitions = {"S": {"type": ["string", "object"]}, "R": self._node(1)}
        self._refs.append("#/$defs/R")  # which leads to no other that leads to it
        return {**self._node(2), "$defs": definitions}

    def _leaf(self) -> Any:
        refs = [{"$ref": ref} for ref in self._refs]
        plain = [TEXT, {"type": "integer"}, {"const": 1}, {"required": ["a"]}, True, False, {}]
        return self._random.choice([*plain, {"type": "object"}, *refs])

    def _any(self, depth: int) -> Any:
        return self._leaf() if depth == 0 else self._node(depth)

    def _some(self, depth: int) -> list[Any]:
        return [self._any(depth - 1) for _ in range(self._random.randint(1, 2))]

    def _node(self, depth: int) -> dict[str, Any]:
        draw = self._random
        ways: dict[str, Callable[[], Any]] = {
            "properties": lambda: {n: self._any(depth - 1) for n in draw.sample("abk", 2)},
            "patternProperties": lambda: {
                pattern: self._leaf() for pattern in draw.sample(["^a", "b", "^[ab]"], 2)
            },
            "required": lambda: draw.sample("abk", 1),
            "additionalProperties": lambda: draw.choice([False, self._leaf()]),
            "unevaluatedProperties": lambda: draw.choice([False, self._leaf()]),
            "minProperties": lambda: draw.randint(0, 2),
            "maxProperties": lambda: draw.randint(0, 3),
            "allOf": lambda: self._some(depth),
            "anyOf": lambda: self._some(depth),
            "oneOf": lambda: self._some(depth),
            "$ref": lambda: draw.choice(self._refs),
            "not": lambda: draw.choice([{"required": ["a"]}, {"properties": {"a": TEXT}}]),
            "propertyNames": lambda: draw.choice([{"pattern": "^[ab]"}, {"enum": ["a", "k"]}]),
        }
        chosen = draw.sample(sorted(ways), draw.randint(1, 4))
        return {
            **({"type": "object"} if draw.random() < 0.6 else {}),
            **{k: ways[k]() for k in chosen},
        }


VALUES: list[Any] = [
    *(None, True, 1, "", "a", [], {}),
    *(
        dict(zip(names, values, strict=True))
        for count in (1, 2)
        for names in itertools.combinations(["a", "b", "ab", "k"], count)
        for values in itertools.product([1, "a", {}, {"a": 1}], repeat=count)
    ),
]


SOME: list[Any] = [{}, {"a": {}}, 1]


def judged(schema: Any, value: Any) -> bool | None:
    try:
        return bool(jsonschema.Draft202012Validator(schema).is_valid(value))
    except RecursionError:
        return None  # a reference that leads to itself alone: nobody can tell


def test_what_has_a_value_is_accepted_and_nothing_goes_unnamed() -> None:
    """Of random schemas; an answer may break only a schema of which something is named."""
    accepted = 0
    for seed in range(300):
        schema = Drawn(seed).root()
        if any(judged(schema, value) is None for value in SOME):
            continue
        validator = jsonschema_rs.Draft202012Validator(schema)
        has_value = any(map(validator.is_valid, VALUES))
        try:
            grammar = compiled(schema, OPEN)
        except BadRequest:
            assert not has_value, json.dumps(schema)
            continue
        accepted += has_value
        with contextlib.suppress(AssertionError):  # some go on and on
            said = json.loads(answer(grammar.matcher(), seed, limit=300))
            if not grammar.unenforced and judged(schema, said) is False:
                pytest.fail(f"{json.dumps(schema)} let {said} through")
    assert accepted > 120
