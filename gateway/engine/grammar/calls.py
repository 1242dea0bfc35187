"""Makes the grammar of an answer from the functions that it may call.

Grammars are in llguidance's variant of Lark, in which `%json` is followed by a JSON Schema and
stands for a value that fits it.
Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.engine.grammar.schemas import Schema, bare
from gateway.engine.grammar.unenforced import to_llguidance
from gateway.errors import BadRequest
from gateway.jobs.chat import Calling, Function, Grammar, SchemaRule

_ANSWER: Final = "answer"
_FREE: Final = "start: tag* TEXT"
# Any of these keywords may allow an object properties that its `properties` keyword doesn't name.
_OPENING = frozenset(
    {
        "additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties",
        "dependentSchemas", "dependencies", "allOf", "anyOf", "oneOf", "not", "if", "$ref",
        "$dynamicRef", "$recursiveRef", "const", "enum",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes a call if no grammar forces it to: JSON between two marks."""

    start: str
    end: str
    # True if llguidance treats the mark (`start`, `end`) as a special token, which has no bytes.
    is_special: bool
    closing_is_special: bool
    # True if calls are messages of their own, to which the answer's grammar does not apply.
    is_separate: bool = False


def answer_grammar(
    calling: Calling | None, form: CallFormat | None, answer: Grammar | None
) -> Grammar | None:
    """Return the grammar of an answer that may make calls in the model's format, `form`; None if
    nothing constrains the answer.

    If there is also a grammar for the answer's text, `answer`, the result allows either calls or
    such a text. Its rules for `schemas` are added when it is compiled (`with_schemas`). Raises
    BadRequest if the model's call format cannot be combined with `answer`.
    """
    if calling is None:
        return answer
    tools = calling.functions
    # A forced call is bare JSON: {"name":…,"arguments":…}.
    if calling.forced:
        rules = [
            SchemaRule(_arguments(i), tool.name, json.dumps(_close(tool.parameters)), tool.strict)
            for i, tool in enumerate(tools)
        ]
        return Grammar("calls", _lark("start: call", tools, rules), schemas=tuple(rules))
    if form is not None and form.is_separate:
        return answer
    # A free call is in the model's own format; a strict function's schema constrains its arguments.
    rules = [
        SchemaRule(_arguments(i), tool.name, json.dumps(dict(tool.parameters)), strict=True)
        for i, tool in enumerate(tools)
        if tool.strict
    ]
    if answer is not None:
        if form is None or answer.kind != "json_schema":
            raise BadRequest(
                "This model's tool calls cannot be combined with a response format: "
                "send only one of them, or set the tool choice to `none` or to one function.",
                part="answer_form",
            )
        rules.append(SchemaRule(_ANSWER, "", answer.source, answer.strict))
        opening = _mark(form.start, is_special=form.is_special) + " "
        source = _lark(f"start: {_ANSWER} | call+", tools, rules, opening, _closing(form))
        return Grammar("calls", source, schemas=tuple(rules))
    if form is None or not rules:
        return None
    if form.is_special:
        start = f"{_FREE}\ntag: TEXT {form.start} call"
    else:
        start = f"{_FREE}\ntag: trigger call\ntrigger[lazy]: TEXT {json.dumps(form.start)}"
    source = _lark(f"{start}\nTEXT: /(.|\\n)*/", tools, rules, "", _closing(form))
    return Grammar("calls", source, schemas=tuple(rules))


def is_free(calls: Grammar) -> bool:
    """Return True if a grammar of calls allows any text around the calls; False if it allows only
    JSON and the calls' marks.
    """
    return calls.source.startswith(_FREE)


def with_schemas(source: str, schemas: Mapping[str, Schema]) -> str:
    """Return a grammar of calls with a rule added for each of `schemas`, keyed by rule name."""
    return "\n".join([source, *(f"{rule}: {_json(schemas[rule])}" for rule in schemas)])


def _close(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Forbid arguments that a function does not declare, unless its schema may allow others."""
    # A model that must call a function without parameters would otherwise invent them endlessly.
    closed = {**parameters, "type": "object"}
    if not _OPENING & parameters.keys() and not _needs_more(parameters):
        closed["additionalProperties"] = False
    return closed


def _needs_more(parameters: Mapping[str, Any]) -> bool:
    """Return True if a schema requires properties that it does not declare. The schema may be
    invalid: it is not checked yet.
    """
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    min_properties = parameters.get("minProperties", 0)
    is_wide = isinstance(min_properties, (int, float)) and min_properties > len(properties)
    return is_wide or any(isinstance(name, str) and name not in properties for name in required)


def _closing(form: CallFormat) -> str:
    if not form.end:
        return ""
    return f' "\\n"? {_mark(form.end, is_special=form.closing_is_special)} "\\n"?'


def _mark(text: str, *, is_special: bool) -> str:
    return text if is_special else json.dumps(text)


def _lark(
    start: str,
    functions: Sequence[Function],
    rules: Sequence[SchemaRule],
    opening: str = "",
    closing: str = "",
) -> str:
    """Return a grammar's text. Its rule `call` matches a call of any of the functions."""
    gap, before = "", ""
    # Calls between marks get the spaces that models are trained to write; calls without marks have
    # none.
    if closing:
        gap, before = " ", '"\\n"? '
    names = " | ".join(f"call_{i}" for i in range(len(functions)))
    lines = [start, f"call: {opening}{before}({names}){closing}"]
    schema_rules = {rule.rule for rule in rules}
    for i, function in enumerate(functions):
        head = json.dumps(f'{{"name":{gap}{json.dumps(function.name)},{gap}"arguments":{gap}')
        lines.append(f'call_{i}: {head} {_arguments(i)} "}}"')
        if _arguments(i) not in schema_rules:
            lines.append(f"{_arguments(i)}: {_json({'type': 'object'})}")
    return "\n".join(lines)


def _arguments(index: int) -> str:
    return f"arguments_{index}"


def _json(schema: Schema) -> str:
    return f"%json {json.dumps(to_llguidance(bare(schema)))}"
