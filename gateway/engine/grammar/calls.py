"""Functions that may be called → the grammar of an answer that calls them.

In Lark's form, as llguidance reads it; `%json` holds a value to a JSON Schema. Source:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from gateway.engine.grammar.schemas import Node, Schema, bare
from gateway.engine.grammar.unenforced import to_llguidance
from gateway.errors import BadRequest
from gateway.jobs import Calling, Grammar, SchemaRule

ANY: dict[str, Any] = {"type": "object"}
_ANSWER: Final = "answer"
# With any of these, an object may have properties that its own `properties` don't name.
_OPENING = frozenset(
    {
        "additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties",
        "dependentSchemas", "dependencies", "allOf", "anyOf", "oneOf", "not", "if", "$ref",
        "$dynamicRef", "$recursiveRef", "const", "enum",
    }
)  # fmt: skip


class Checked(Protocol):
    """Returns the form of a schema that an answer is held to."""

    def __call__(self, schema: Mapping[str, Any], function: str, /, *, strict: bool) -> Node:
        """`function` owns the parameters, if any does. Raises BadRequest for what is no schema."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes a call on its own: JSON between two marks.

    The flags say which marks llguidance treats as special tokens: those have no bytes. Calls that
    are `is_separate` are messages separate from the answer, and its grammar does not apply to them.
    """

    start: str
    end: str
    is_special: bool
    closing_is_special: bool
    is_separate: bool = False


def answer_grammar(
    calling: Calling | None,
    form: CallFormat | None,
    answer: Grammar | None,
    checked: Checked,
) -> Grammar | None:
    """Return the grammar of an answer with these calls and this form; None if it is free.

    A forced call is bare JSON: {"name":…,"arguments":…}. A free one keeps the model's own form, and
    is held to its schema if a function is strict. With an `answer` grammar too, the whole is either
    calls or that answer. `checked` returns a schema in the form to enforce, given its place. Raises
    BadRequest if the model's form leaves no way to write that.
    """
    if calling is None:
        return answer
    rules: list[SchemaRule] = []

    def held(rule: str, schema: Mapping[str, Any], function: str, *, strict: bool) -> Node:
        form = checked(schema, function, strict=strict)
        rules.append(SchemaRule(rule, function, json.dumps(dict(schema)), strict))
        return form

    if calling.forced:
        schemas = [
            (tool.name, held(_arguments(i), _close(tool.parameters), tool.name, strict=tool.strict))
            for i, tool in enumerate(calling.functions)
        ]
        source = _lark("start: call", schemas, "", "")
        return Grammar("calls", source, schemas=tuple(rules))
    if form is not None and form.is_separate:
        return answer
    free = [
        (
            tool.name,
            held(_arguments(i), tool.parameters, tool.name, strict=True) if tool.strict else ANY,
        )
        for i, tool in enumerate(calling.functions)
    ]
    if answer is not None:
        if form is None or answer.kind != "json_schema":
            raise BadRequest(
                "This model's tool calls cannot be held together with a form of answers: "
                "ask for tools or for a form, or choose `none` or one function.",
                part="answer_form",
            )
        schema = held(_ANSWER, json.loads(answer.source), "", strict=answer.strict)
        start = f"start: {_ANSWER} | call+\n{_ANSWER}: {_json(schema)}"
        opening = form.start if form.is_special else json.dumps(form.start)
        return Grammar("calls", _lark(start, free, opening, _closing(form)), schemas=tuple(rules))
    if form is None or not any(function.strict for function in calling.functions):
        return None
    if form.is_special:
        start = f"start: tag* TEXT\ntag: TEXT {form.start} body"
    else:
        start = f"start: tag* TEXT\ntag: trigger body\ntrigger[lazy]: TEXT {json.dumps(form.start)}"
    source = _lark(f"{start}\nTEXT: /(.|\\n)*/", free, "", _closing(form))
    return Grammar("calls", source.replace("\ncall:", "\nbody:", 1), schemas=tuple(rules))


def with_forms(source: str, forms: Mapping[str, Schema]) -> str:
    """Return the grammar of calls with other schemas in these rules."""
    rules = []
    for line in source.split("\n"):
        rule, _, _ = line.partition(":")
        rules.append(f"{rule}: {_json(forms[rule])}" if rule in forms else line)
    return "\n".join(rules)


def of_function(function: str, error: BadRequest) -> BadRequest:
    """Name, in a refusal, the function whose parameters it is about, if there is one."""
    if not function:
        return error
    message = f"The parameters of '{function}': {error.message}"
    return BadRequest(message, part="tools", code=error.code)


def _close(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Forbid arguments that a function does not declare, unless it says that there may be more.

    A model that must call a function without parameters would otherwise invent some, without end.
    """
    if _OPENING & parameters.keys() or _needs_more(parameters):
        return parameters
    return {"type": "object", **parameters, "additionalProperties": False}


def _needs_more(parameters: Mapping[str, Any]) -> bool:
    """Return True if a schema, not checked yet, requires properties that it does not declare."""
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    min_properties = parameters.get("minProperties", 0)
    is_wide = isinstance(min_properties, (int, float)) and min_properties > len(properties)
    return is_wide or any(isinstance(name, str) and name not in properties for name in required)


def _closing(form: CallFormat) -> str:
    mark = form.end if form.closing_is_special else json.dumps(form.end)
    return f'"\\n"? {mark} "\\n"?' if form.end else ""


def _lark(
    start: str, functions: Sequence[tuple[str, dict[str, Any]]], opening: str, closing: str
) -> str:
    """Return the rules: `call` is one of the functions, each with its own arguments.

    Between marks a call is spaced as models are trained to space it, without them it is compact.
    """
    gap = " " if closing else ""
    names = " | ".join(f"call_{i}" for i in range(len(functions)))
    before = [opening] if opening else []
    around = ['"\\n"?', f"({names})", closing] if closing else [f"({names})"]
    rules = [start, " ".join(["call:", *before, *around])]
    for i, (name, schema) in enumerate(functions):
        head = json.dumps(f'{{"name":{gap}{json.dumps(name)},{gap}"arguments":{gap}')
        rules.append(f'call_{i}: {head} {_arguments(i)} "}}"')
        rules.append(f"{_arguments(i)}: {_json(schema)}")
    return "\n".join(rules)


def _arguments(index: int) -> str:
    return f"arguments_{index}"


def _json(schema: Schema) -> str:
    return f"%json {json.dumps(to_llguidance(bare(schema)))}"
