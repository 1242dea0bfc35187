"""Calls → their text, as a model of a family writes it."""

import json
import re
from collections.abc import Callable
from typing import Any

from gateway.engine.answers.call_reading import Call
from gateway.engine.answers.call_values import type_of

WriteValue = Callable[[Any], str]


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_text(value: Any) -> str:
    """Write a text as it is, and any other value as JSON."""
    return value if isinstance(value, str) else as_json(value)


def as_cdata(value: Any) -> str:
    """Write as CDATA whatever XML would read otherwise, or trim."""
    text = as_text(value)
    return f"<![CDATA[{text}]]>" if re.search(r"[<&\s]", text) else text


def write_gemma_value(delimiter: str, value: Any) -> str:
    """Write as Gemma does: keys without quotes, texts between delimiters."""
    if isinstance(value, str):
        return f"{delimiter}{value}{delimiter}"
    if isinstance(value, list):
        return f"[{','.join(write_gemma_value(delimiter, each) for each in value)}]"
    if isinstance(value, dict):
        pairs = (f"{key}:{write_gemma_value(delimiter, each)}" for key, each in value.items())
        return f"{{{','.join(pairs)}}}"
    return as_json(value)


def write_elements(mark: str, value: Any) -> str:
    """Write as MiniMax M3 does: each pair and each item is an element, a mark before its tags."""
    if not isinstance(value, dict | list):
        return as_text(value)
    pairs = value.items() if isinstance(value, dict) else [("item", each) for each in value]
    texts = ((key, write_elements(mark, each)) for key, each in pairs)
    return "".join(f"{mark}<{key}>{text}{mark}</{key}>" for key, text in texts)


def write_call(call: Call, form: str, pair: str, write_value: WriteValue, **more: Any) -> str:
    """Fill a family's form of a call, and its form of an argument if it has one of its own.

    A form's fields are `name`, `arguments` or `pairs`, and `more`; those of a pair `key`, `value`,
    `kind` (its JSON type) and `is_text`.
    """
    arguments = call["arguments"]
    pairs = [
        pair.format(
            key=key,
            value=write_value(value),
            kind=type_of(value),
            is_text=as_json(isinstance(value, str)),
        )
        for key, value in arguments.items()
    ]
    separator = "" if pair.endswith(("\n", ">")) else ","
    written = {"name": call["name"], "arguments": as_json(arguments), **more}
    return form.format(pairs=separator.join(pairs), **written)
