"""Answers of families without a reader of ours, read by the `response_template` of the checkpoint.

That is transformers' form (utils/chat_parsing): patterns that cut a whole text into the fields of a
message. The patterns are the checkpoint's and may take for ever, so transformers reads in the
sandbox.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from gateway.engine.answers.call_bodies import calls_of
from gateway.engine.answers.output_parts import CallWriter, spell_out, strip_marks
from gateway.engine.sandbox_worker import Sandbox
from gateway.jobs import Delta, Reading, SequenceParams

PREFIX_TOKENS: Final = 256  # of the prompt's end, where a template may open a thought
MOST_BYTES: Final = 1 << 29  # of memory
THOUGHTS: Final = ("thinking", "reasoning_content", "reasoning")
FIELDS: Final = frozenset({"role", "content", "tool_calls", *THOUGHTS})


class ResponseTemplate:
    """Reads answers, unless it has a `problem`. Safe on any thread."""

    def __init__(self, template: Any, sandbox: Sandbox) -> None:
        self._request = {"kind": "reading", "template": template, "max_bytes": MOST_BYTES}
        self._sandbox = sandbox
        outcome, why = self._ask(None, "", {})
        self.problem = None if outcome in ("read", "busy", "slow", "killed") else str(why)

    def read(
        self, row: SequenceParams, text: str, prefix: str, calls: CallWriter, *, is_cut: bool
    ) -> Reading:
        """Return the parts of a whole answer: thoughts, text and calls.

        `text` has its special tokens spelled, and `prefix` is the end of its prompt. An answer that
        cannot be read, or that calls what it may not or was cut, is text as it stands; the second
        value is the reason, else None. Takes up to the sandbox's time.
        """
        functions: dict[str, Mapping[str, Any]] = {}
        if row.calling is not None and not is_cut:
            functions = {each.name: dict(each.parameters) for each in row.calling.functions}
        problem = None
        try:
            outcome, message = self._ask(spell_out(text), prefix, functions)
            if outcome != "read":
                raise ValueError(message)
            parts = _parts(row.index, message, functions, calls)
            if not parts and strip_marks(text).strip():
                raise ValueError("it reads nothing of a text")
        except (ValueError, AttributeError, TypeError) as error:
            parts, problem = [Delta(row.index, strip_marks(text))], str(error)
        return parts, problem

    def _ask(self, text: str | None, prefix: str, functions: Mapping[str, Any]) -> tuple[str, Any]:
        tools = [{"name": name, "parameters": each} for name, each in functions.items()]
        given = {"text": text, "prefix": prefix, "tools": tools}
        most = 2 * len(f"{text}{prefix}")  # characters of a message: its text, in JSON
        request = {**self._request, **given, "max_chars": most}
        # A pattern may take for ever over one answer, and read the next.
        key = hashlib.blake2b(json.dumps(request).encode(), digest_size=32).digest()
        return self._sandbox(request, key)


def _parts(
    index: int, message: Any, functions: Mapping[str, Any], calls: CallWriter
) -> list[Delta]:
    """Return the parts of a message in transformers' form. Raises what another form leads to."""
    thoughts = next((message[name] for name in THOUGHTS if message.get(name)), "")
    text, listed = message.get("content") or "", message.get("tool_calls") or []
    is_message = isinstance(thoughts, str) and isinstance(text, str) and message.keys() <= FIELDS
    read = calls_of(listed)
    if not is_message or len(read) < len(listed):
        raise ValueError("it makes other fields than those of a message")
    if not {call["name"] for call in read} <= functions.keys():
        raise ValueError("a call was cut, or may not be made")
    parts = [Delta(index, reasoning=thoughts), Delta(index, text)]
    parts += [Delta(index, call=call) for call in calls.write(read)]
    return [part for part in parts if part != Delta(index)]
