"""The second backend: outlines_core, a finite automaton over the model's tokens.

It ignores much of JSON Schema without a word, so a schema may use only what is listed here. It
has no fuel either, so the automaton is built in the sandbox.
"""

import json
import math
import pickle
import re
from collections.abc import Iterator
from typing import Any, Final

from outlines_core import Guide, Index  # type: ignore[import-untyped]

from gateway.engine.grammar import schemas
from gateway.engine.grammar.compiling import (
    Bounds,
    CompiledGrammar,
    read_schema,
    text_of,
)
from gateway.engine.grammar.matching import GuideState
from gateway.engine.grammar.schemas import Node, Schema
from gateway.engine.grammar.shaping import Shape, shaped
from gateway.engine.grammar.tokenizer import GrammarTokenizer
from gateway.engine.grammar.trial import Sandbox, check_survived, key_of
from gateway.errors import BadRequest
from gateway.jobs import Grammar

_MAX_BYTES: Final = 4 << 30  # an automaton may be large, and is then what the caller asked for
_NOTES: Final = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$comment", "$defs", "definitions", "x-guidance"),
        *("contentEncoding", "contentMediaType", "discriminator", "nullable"),
    }
)
_UNSUPPORTED: Final = frozenset(
    {
        *("not", "if", "then", "else", "uniqueItems", "propertyNames"),
        *("contains", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties"),
        *("dependentRequired", "dependentSchemas", "$dynamicRef", "$recursiveRef"),
    }
)
_SHAPES: Final = {
    "string": ({"minLength", "maxLength"}, {"pattern"}, {"format"}),
    "array": (
        {"items", "minItems", "maxItems"},
        {"prefixItems", "items", "minItems", "maxItems"},
    ),
    "object": ({"properties", "required", "additionalProperties"},),
    **dict.fromkeys(("integer", "number", "boolean", "null"), (set[str](),)),
}
_KEYWORDS: Final = {
    *(key for shapes in _SHAPES.values() for keys in shapes for key in keys),
    *("type", "$ref", "anyOf", "enum", "const", "oneOf", "allOf", "minProperties"),
    *("maxProperties", "patternProperties", "minimum", "maximum", "exclusiveMinimum"),
    *("exclusiveMaximum", "multipleOf", "$anchor", "$dynamicAnchor"),
}
# A pattern is matched against the JSON text, so it must not reach a quote or a backslash.
_SAFE_PATTERN: Final = re.compile(
    r"\^?(?:[\w \-+*?|(){}:;,@/#%&=!~<>']"
    r"|\\[dw.\-+*?|(){}/\[\]$^]"
    r"|\[(?!\^)(?:[\w \-.,:;@/+*?#%&=!~]|\\[.\-])+\])*\$?",
    re.ASCII,
)
_DATE: Final = (
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?Z"
_FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
_CLASS: Final = re.compile(r"(?<!\\)\[([^\]]*)\]")
_ODD_CLASS: Final = re.compile(r"[^\w]-|-[^\w\]]|&&|~~", re.ASCII)  # some are Rust's set algebra
_RANGE: Final = re.compile(r"(?=(\w-\w))", re.ASCII)
_PLAIN_RANGE: Final = re.compile(r"[0-9]-[0-9]|[a-z]-[a-z]|[A-Z]-[A-Z]")
_ODD_GROUP: Final = re.compile(r"^[?*+{]|\((?:[*+{]|\?(?!:))|\{,")  # flags above all
_OPEN: Final[Node] = {"anyOf": [{}]}  # it writes `{}` as alternatives without brackets


def compile_index(
    tokenizer: GrammarTokenizer,
    grammar: Grammar,
    sandbox: Sandbox,
    *,
    shape: Shape | None = None,
    bounds: Bounds | None = None,
) -> CompiledGrammar:
    """Compile with outlines_core. Raises BadRequest for what it can't do, or would ignore."""
    bounds = bounds or Bounds()
    code = "invalid_json_schema" if grammar.kind == "json_schema" else "invalid_grammar"
    if grammar.kind == "json_schema":
        schema = read_schema(grammar.source, bounds).schema
        check_index_schema(schema)
        tight = schemas.rebuilt(shaped(schema, shape or Shape(), recursive=False), _plain)
        source = json.dumps(tight, ensure_ascii=False)
    elif grammar.kind == "grammar":
        raise BadRequest(
            "Grammars need the llguidance backend; this model uses outlines_core.",
            param="response_format",
            code=code,
        )
    else:
        source = text_of(grammar, bounds)
    form = "json_schema" if grammar.kind == "json_schema" else "regex"
    eos_id = tokenizer.eos_ids[0]
    request: dict[str, Any] = {
        "form": form,
        "source": source,
        "eos_id": eos_id,
        "texts": tokenizer.texts.ids,
    }
    request |= {"kind": "index", "max_bytes": _MAX_BYTES}
    outcome, value = sandbox(request, key_of("index", form, source, str(len(tokenizer.texts.ids))))
    if outcome == "refused":
        raise BadRequest(
            f"outlines_core cannot compile it: {str(value)[:1000].strip()}",
            param="response_format",
            code=code,
        )
    check_survived(outcome, value, code)
    index: Index = pickle.loads(value)
    return CompiledGrammar(
        lambda: GuideState(Guide(index), tokenizer.eos_ids[0]), tokenizer.eos_ids
    )


def _plain(node: Schema) -> Schema:
    """Write a schema so that outlines_core lets only JSON through, and only what was meant.

    Its `\\d` and `\\w` are Unicode's, its `uri` and `email` take quotes, and it puts neither
    patterns nor open values in brackets of their own.
    """
    if node is True:
        return _OPEN
    if isinstance(node, dict) and not (node.keys() & _KEYWORDS) - _NOTES:
        return {**node, **_OPEN}
    if isinstance(node, dict):  # without these it has a smaller automaton for open values
        for key in ("items", "additionalProperties"):
            if isinstance(node.get(key), dict) and node[key].get("anyOf") == _OPEN["anyOf"]:
                del node[key]
    if isinstance(node, dict) and "format" in node and schemas.types(node) == {"string"}:
        node["pattern"] = _FORMATS[node.pop("format")]
    elif isinstance(node, dict) and isinstance(node.get("pattern"), str):
        body = _body(node["pattern"]).replace(r"\d", "[0-9]").replace(r"\w", "[0-9A-Za-z_]")
        node["pattern"] = f"^({body})$"
    return node


def check_index_schema(schema: Schema) -> None:
    """Refuse, naming keyword and place, whatever outlines_core would ignore or get wrong."""
    known = {id(node) for _, node in schemas.walk(schema)}
    for place, node in schemas.walk(schema):
        for key in node:
            if key in _UNSUPPORTED:
                raise schemas.refused(
                    f"The JSON Schema keyword `{key}` at {place} is not supported."
                )
        keys = (node.keys() & _KEYWORDS) - _NOTES
        _check_node(place, node, keys)
        target = schemas.resolve(schema, node["$ref"]) if "$ref" in keys else node
        if target is not True and id(target) not in known:  # what nobody has checked
            raise _unsupported(place, "$ref", f"to `{node['$ref']}`")
    _check_recursion(schema)


def _check_node(place: str, node: Node, keys: set[str]) -> None:
    alone: str
    for alone in ("$ref", "anyOf", "enum", "const"):
        if alone in keys:
            _only(place, keys, {alone, "type"} if alone in ("enum", "const") else {alone})
            if node[alone] == [] and alone != "const":
                raise _unsupported(place, alone, "when empty")
            if alone in ("enum", "const") and any(map(_must_be_escaped, _names(node[alone]))):
                raise _unsupported(place, alone, "with names that JSON must escape")
            if "type" in keys:
                _check_values(place, node)
            return
    if not keys:
        return
    named = node.get("type")
    if named is None:
        raise _unsupported(place, min(keys), "without `type`")
    if isinstance(named, list):
        _only(place, keys, {"type"})
        return
    if not any(keys <= {"type", *shape} for shape in _SHAPES[named]):
        known = set[str]().union(*_SHAPES[named])
        beyond = keys - known - {"type"} or keys & {"maxLength", "minLength", "items", "format"}
        raise _unsupported(place, max(beyond), "there")
    if "format" in keys and node["format"] not in _FORMATS:
        raise _unsupported(place, "format", f"as `{node['format']}`")
    if "pattern" in keys and not _is_safe(node["pattern"]):
        raise _unsupported(place, "pattern", "unless it is plain")
    if node.get("minItems", 0) > node.get("maxItems", math.inf):
        raise _unsupported(place, "minItems", "above `maxItems`")
    for name in node.get("properties", {}):
        if _must_be_escaped(name):
            named = json.dumps(name)
            raise _unsupported(place, "properties", f"with a name that JSON must escape, {named},")
    if "prefixItems" in keys:
        size = len(node["prefixItems"])
        if not node.get("minItems", size) <= size <= node.get("maxItems", size):
            raise _unsupported(place, "prefixItems", "of another length than its array")
    if not set(node.get("required", ())) <= node.get("properties", {}).keys():
        raise _unsupported(place, "required", "for a name that is not in `properties`")
    if "properties" not in keys and node.get("additionalProperties") is False:
        raise _unsupported(place, "additionalProperties", "without `properties`")


def _is_safe(pattern: str) -> bool:
    if _SAFE_PATTERN.fullmatch(pattern) is None or _ODD_GROUP.search(_body(pattern)):
        return False
    for group in _CLASS.findall(pattern):
        if _ODD_CLASS.search(group) or not all(
            _PLAIN_RANGE.fullmatch(ends) for ends in _RANGE.findall(group)
        ):
            return False
    try:
        re.compile(pattern)  # whose brackets pair, or ours would not hold it
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _body(pattern: str) -> str:
    """Take off the anchors: the pattern is matched whole in any case."""
    return re.sub(r"(?<!\\)\$\Z", "", pattern.removeprefix("^"))


def _must_be_escaped(name: str) -> bool:
    return json.dumps(name, ensure_ascii=False) != f'"{name}"'


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    if isinstance(value, (dict, list)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _names(child)


def _only(place: str, keys: set[str], allowed: set[str]) -> None:
    if beside := keys - allowed:
        raise _unsupported(
            place, min(beside), f"beside `{min(allowed - {'type'}, default='type')}`"
        )


def _check_values(place: str, node: Node) -> None:
    values = node["enum"] if "enum" in node else [node["const"]]
    if not all(_type(value) & schemas.types(node) for value in values):
        raise _unsupported(place, "enum" if "enum" in node else "const", "of another `type`")


def _type(value: Any) -> set[str]:
    if value is None:
        return {"null"}
    names = {bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, str: {"string"}}
    return names.get(type(value), {"array"} if isinstance(value, list) else {"object"})


def _check_recursion(root: Schema) -> None:
    """Refuse references that come round: the automaton would cut them off half way."""

    def follow(schema: Schema, above: tuple[str, ...]) -> None:
        for place, node in schemas.walk(schema):
            ref = node.get("$ref")
            if place.startswith(("#/$defs/", "#/definitions/")) or not isinstance(ref, str):
                continue
            if ref in above or ref == "#":
                raise _unsupported(ref, "$ref", "to itself")
            if ref not in seen and (target := schemas.resolve(root, ref)) is not None:
                follow(target, (*above, ref))
                seen.add(ref)

    seen: set[str] = set()
    follow(root, ())


def _unsupported(place: str, key: str, when: str) -> BadRequest:
    return schemas.refused(
        f"The JSON Schema keyword `{key}` at {place} is not supported {when} by outlines_core; "
        "llguidance may."
    )
