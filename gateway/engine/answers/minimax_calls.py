"""Reads MiniMax M3's calls: elements named after the arguments, with a mark before each tag.

    ]<]minimax[>[<invoke name="book">
    ]<]minimax[>[<tags>]<]minimax[>[<item>a]<]minimax[>[</item>]<]minimax[>[</tags>
    ]<]minimax[>[</invoke>

A text may contain tags. An element ends with the tag that balances its opening tag, and unbalanced
tags inside the element are plain text.

Sources: ms-swift's swift/agent_template/minimax_m3.py; the parsers of vLLM and SGLang.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import regex  # type: ignore[import-untyped]

from gateway.engine.answers.call_bodies import Body, match_head
from gateway.engine.answers.call_values import Allowed, Schemas, Unfinished

MARK = "]<]minimax[>["
_DEPTH = 64  # the most elements open at once
_START = rf"{regex.escape(MARK)}\s*+<"
_HEAD = regex.compile(rf"\s*+{_START}invoke\s++name=[\"']?+(?P<name>[^\"'<>\s]{{1,256}})[\"']?+>")
_NAME = r"(?P<name>invoke(?=\s)|[^<>/\s][^<>]{0,255}+)(?:(?<=invoke)\s[^<>]*+)?"
_TAG = regex.compile(rf"{_START}(?P<ends>/?+){_NAME}>")


@dataclass(slots=True)
class _Element:
    name: str
    schema: Any
    begin: int  # the place where the element's text begins
    at: int  # the place up to which the text has been read
    text: str = ""
    parts: list["_Element"] = field(default_factory=list)
    has_text: bool = False  # there is text between the parts

    def value(self, allowed: Allowed) -> Any:
        types = allowed.types(self.schema) - {"null"}
        if not self.text.strip() and types in ({"array"}, {"object"}):
            return [] if "array" in types else {}
        if self.parts and not self.has_text:
            is_list = {part.name for part in self.parts} == {"item"}
            if is_list and (not types or "array" in types):
                return [part.value(allowed) for part in self.parts]
            if not types or "object" in types:
                return self.fields(allowed)
        if MARK in self.text and types and "string" not in types:
            raise ValueError("text between the parts, or a name twice")
        return allowed.value(self.text, self.schema)

    def fields(self, allowed: Allowed) -> dict[str, Any]:
        if self.has_text or len({part.name for part in self.parts}) < len(self.parts):
            raise ValueError("text between the parts, or a name twice")
        return {part.name: part.value(allowed) for part in self.parts}


def read_minimax(text: str, at: int, schemas: Schemas, closers: Sequence[str]) -> Body:
    """Read one call. Raises ValueError for text between arguments or an argument twice."""
    head = match_head(_HEAD, text, at)
    schema = schemas.get(head["name"], {})
    allowed = Allowed(schema)
    stack = [_Element("invoke", schema, head.end(), head.end())]
    for tag in _TAG.finditer(text, head.end()):
        name, inner = tag["name"], stack[-1]
        if tag["ends"] and name not in {each.name for each in stack[len(stack) > 1 :]}:
            continue
        inner.has_text = inner.has_text or bool(text[inner.at : tag.start()].strip())
        if not tag["ends"]:
            if len(stack) > _DEPTH:
                break
            is_item = name == "item" and len(stack) > 1
            schema = allowed.inner(inner.schema, name, is_item=is_item)
            stack.append(_Element(name, schema, tag.end(), tag.end()))
            continue
        while stack[-1].name != name:
            stack.pop()
            stack[-1].has_text = True
        element = stack.pop()
        if not stack:
            return [{"name": head["name"], "arguments": element.fields(allowed)}], tag.end()
        element.text = text[element.begin : tag.start()]
        stack[-1].parts.append(element)
        stack[-1].at = tag.end()
    raise Unfinished("no end of a call")
