"""Reads answers with the checkpoint's `response_template`, for families that have no parser here.

transformers (utils/chat_parsing) applies the template's patterns. It runs in the sandbox, because a
pattern may never end.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from gateway.engine.answers.call_bodies import calls_of
from gateway.engine.answers.output_parts import CallWriter, spell_out, strip_marks
from gateway.engine.sandbox_worker import Sandbox
from gateway.errors import Overloaded, Unavailable
from gateway.jobs.chat import Delta, Reading
from gateway.jobs.steps import SequenceParams

PREFIX_TOKENS: Final = 256  # tokens at the prompt's end, where a template may open a thought
MOST_BYTES: Final = 1 << 29  # bytes of memory in the sandbox
MOST_ENDED: Final = 3  # failed processes in a row, after which the template is not used
BUSY_S: Final = 2.0
THOUGHTS: Final = ("thinking", "reasoning_content", "reasoning")
FIELDS: Final = frozenset({"role", "content", "tool_calls", *THOUGHTS})


class ResponseTemplate:
    """Reads answers with a checkpoint's template. Threads may share it.

    `problem` says why the template is not used, or is None.
    """

    def __init__(self, template: Any, sandbox: Sandbox) -> None:
        self._request = {"kind": "reading", "template": template, "max_bytes": MOST_BYTES}
        self._sandbox = sandbox
        self._ended = 0
        outcome, why = self._ask(None, "", {})
        self.problem = None if outcome in ("read", "busy", "slow", "killed") else str(why)

    def read(
        self, params: SequenceParams, text: str, prefix: str, calls: CallWriter, *, is_cut: bool
    ) -> Reading:
        """Return the parts of a whole answer, and either an event to log with its reason or None.

        `text` has spelled tokens (output_parts.py), and `prefix` is the end of the prompt. An
        answer that cannot be read is returned as text. Raises Overloaded if the sandbox is busy,
        and Unavailable if its process was killed or got no processor time.
        """
        functions: dict[str, Mapping[str, Any]] = {}
        if params.calling is not None and not is_cut:
            functions = {each.name: dict(each.parameters) for each in params.calling.functions}
        outcome, message = "refused", self.problem
        if self.problem is None:
            outcome, message = self._ask(spell_out(text), prefix, functions)
        if outcome == "busy":
            raise Overloaded("Other answers are being read; ask again.", retry_after_s=BUSY_S)
        if outcome in ("killed", "slow"):
            raise Unavailable(f"The answer was not read: {message}.", retry_after_s=BUSY_S)
        self._ended = self._ended + 1 if outcome in ("late", "died") else 0
        if self._ended == MOST_ENDED:
            self.problem = f"{message}, {MOST_ENDED} times in a row"
        try:
            if outcome != "read":
                raise ValueError(message)
            return _parts(params.index, message, text, functions, calls)
        except (ValueError, AttributeError, TypeError) as error:
            event = "response_template_unused" if self.problem else "answer_not_read"
            return [Delta(params.index, strip_marks(text))], (event, self.problem or str(error))

    def _ask(self, text: str | None, prefix: str, functions: Mapping[str, Any]) -> tuple[str, Any]:
        tools = [{"name": name, "parameters": each} for name, each in functions.items()]
        given = {"text": text, "prefix": prefix, "tools": tools}
        most = 2 * len(f"{text}{prefix}")
        request = {**self._request, **given, "max_chars": most}
        # The sandbox refuses a key that hung before, so the key covers the text as well.
        key = hashlib.blake2b(json.dumps(request).encode(), digest_size=32).digest()
        outcome, value = self._sandbox(request, key)
        if outcome in ("busy", "killed"):  # other work was the cause: try once more
            outcome, value = self._sandbox(request, key)
        return outcome, value


def _parts(
    index: int, message: Any, text: str, functions: Mapping[str, Any], calls: CallWriter
) -> Reading:
    """Return the parts of a message that transformers read from `text`.

    Raises ValueError, AttributeError or TypeError if the message is malformed.
    """
    thoughts = next((message[name] for name in THOUGHTS if message.get(name)), "")
    content, listed = message.get("content") or "", message.get("tool_calls") or []
    is_message = isinstance(thoughts, str) and isinstance(content, str)
    read, problem = calls_of(listed), None
    if not is_message or not message.keys() <= FIELDS or len(read) < len(listed):
        raise ValueError("it yields fields or values that a message does not have")
    if not {call["name"] for call in read} <= functions.keys():
        read, problem = [], ("answer_not_read", "a call was cut, or may not be made")
        thoughts = thoughts if thoughts in text else ""
        content = strip_marks(text.replace(thoughts, "", 1))
    parts = [Delta(index, reasoning=thoughts), Delta(index, content)]
    parts += [Delta(index, call=call) for call in calls.write(read)]
    shown = [part for part in parts if part != Delta(index)]
    if not shown and strip_marks(text).strip():
        raise ValueError("it finds no part of a message in the text")
    return shown, problem
