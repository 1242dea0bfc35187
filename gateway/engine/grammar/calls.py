"""Makes the grammar of an answer from the functions that it may call, in llguidance's Lark.

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
# Keywords that may allow properties that the keyword `properties` does not name.
_OPENING = frozenset(
    {
        "additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties",
        "dependentSchemas", "dependencies", "allOf", "anyOf", "oneOf", "not", "if", "$ref",
        "$dynamicRef", "$recursiveRef", "const", "enum",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls, as JSON between two marks or as separate messages."""

    start: str
    end: str
    is_special: bool  # `start` is a special token, which has no bytes
    closing_is_special: bool
    is_separate: bool = False  # the answer's grammar does not apply to calls


def answer_grammar(
    calling: Calling | None, form: CallFormat | None, answer: Grammar | None
) -> Grammar | None:
    """Return the grammar of an answer that may make calls, or None if nothing constrains it.

    With a grammar `answer` for the text, the result allows either calls or a text. Raises
    BadRequest if `form` cannot be combined with `answer`.
    """
    if calling is None:
        return answer
    tools = calling.functions
    # A forced call is JSON without marks.
    if calling.forced:
        rules = [
            SchemaRule(_arguments(i), tool.name, json.dumps(_close(tool.parameters)), tool.strict)
            for i, tool in enumerate(tools)
        ]
        return Grammar("calls", _lark("start: call", tools, rules), schemas=tuple(rules))
    if form is not None and form.is_separate:
        return answer
    # In free calls, only the schemas of strict functions constrain arguments.
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
    """Return True if a grammar of calls allows any text around the calls."""
    return calls.source.startswith(_FREE)


def with_schemas(source: str, schemas: Mapping[str, Schema]) -> str:
    return "\n".join([source, *(f"{rule}: {_json(schemas[rule])}" for rule in schemas)])


def _close(parameters: Mapping[str, Any]) -> dict[str, Any]:
    # A model that must call a function without parameters would invent arguments endlessly.
    closed = {**parameters, "type": "object"}
    if not _OPENING & parameters.keys() and not _needs_more(parameters):
        closed["additionalProperties"] = False
    return closed


def _needs_more(parameters: Mapping[str, Any]) -> bool:
    # The schema has not been checked yet, so it may be invalid.
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
    """Return a grammar whose rule `call` matches a call of any of the functions."""
    gap, before = "", ""
    # Calls between marks have the spaces that models are trained to write.
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
