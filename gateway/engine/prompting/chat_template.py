"""A model's chat template: a Jinja program from its checkpoint, which may take any time and memory.

transformers runs the template in jinja2's sandbox, which limits its access to Python objects. We
run transformers' function in a process that is killed if it exceeds a limit of time or memory
(`Sandbox`), so the cost is bounded and the rendered text is the same.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from mlx_lm.tokenizer_utils import TokenizerWrapper

from gateway.engine.sandbox_worker import Sandbox
from gateway.errors import BadRequest, ModelLoadFailed, Overloaded, Unavailable

MOST_CHARS: Final = 1_000_000  # the rendered text's limit: this plus two per input character
MOST_BYTES: Final = 1 << 29  # the memory allowed: this plus eight bytes per input character
BUSY_S: Final = 2.0  # seconds after which a caller should retry if the sandbox is busy
HELLO: Final = ({"role": "user", "content": "Hello!"},)


class TemplateRefusal(BadRequest):
    """The template refused a conversation by raising an error, whose text is in the message."""


class ChatTemplate:
    """A model's chat template, which renders conversations. Safe on any thread.

    It is rendered in this process if there is no sandbox, or if mlx-lm has a Python function for
    the model instead of a Jinja template (`is_program` is true then).
    """

    def __init__(self, wrapper: TokenizerWrapper, sandbox: Sandbox | None) -> None:
        self._wrapper: Any = wrapper
        self._sandbox = sandbox
        self.is_program = wrapper._chat_template is not None
        # Hermes 3 and Command-R have several named templates, one of which renders tools.
        named = wrapper._tokenizer.chat_template or ""
        self.text = named if isinstance(named, str) else "\n".join(named.values())

    def has(self, word: str) -> bool:
        """Return True if the template contains a word, or is one of mlx-lm's functions."""
        return self.is_program or word in self.text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
    ) -> str:
        """Render messages as transformers' `apply_chat_template` does, with these tools and other
        arguments.

        If the template refuses or drops a system turn that isn't the first turn, all such turns
        become parts of user turns at the same places.

        Raises TemplateRefusal if the template refuses the conversation, BadRequest if rendering
        takes too much time or memory, Overloaded if the sandbox is busy with other templates, and
        Unavailable if the system killed the sandbox's process or gave it no CPU time.
        """
        outcome, value = self._render_once(messages, tools, arguments)
        # A template may raise an error for a late system turn, or silently drop it.
        late = [turn for turn in messages[1:] if turn["role"] == "system"]
        if late and not (outcome == "rendered" and _has_texts(str(value), late)):
            outcome, value = self._render_once(fold_late_systems(messages), tools, arguments)
        if outcome == "rendered":
            return str(value)
        if outcome == "busy":
            raise Overloaded(
                "Other chat templates are being rendered; ask again.", retry_after_s=BUSY_S
            )
        if outcome in ("killed", "slow"):
            raise Unavailable(
                f"The model's chat template was not rendered: {value}.", retry_after_s=BUSY_S
            )
        is_refused = outcome == "refused"
        verb, error = (
            ("refuses", TemplateRefusal) if is_refused else ("could not render", BadRequest)
        )
        raise error(
            f"The model's chat template {verb} these messages: {str(value)[:500]}",
            part="prompt",
        )

    def check(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Raise ModelLoadFailed if rendering a greeting exceeds the limits of time or memory.

        A template that refuses the greeting passes: it may require other messages.
        """
        if self._sandbox is None:
            return
        outcome, why = self._render_once(HELLO, (), {"add_generation_prompt": True, **arguments})
        if outcome in ("late", "died", "large"):
            raise ModelLoadFailed(name, f"its chat template cannot be rendered: {why}")

    def _render_once(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
    ) -> tuple[str, Any]:
        wrapper = self._wrapper
        try:
            listed = list(tools) or None
            if self.is_program:
                turns = [_with_texts(message) for message in messages]
                return "rendered", wrapper._chat_template(turns, tools=listed, **arguments)
            if self._sandbox is None:
                return "rendered", wrapper._tokenizer.apply_chat_template(
                    list(messages), tools=listed, tokenize=False, **arguments
                )
            text = json.dumps(self._arguments(messages, tools, arguments), default=str)
        except Exception as error:  # a template is a program, and may raise any error
            return "refused", str(error)
        request = {
            "kind": "template",
            "arguments": text,
            "max_chars": MOST_CHARS + 2 * len(text),
            "max_bytes": MOST_BYTES + 8 * len(text),
        }
        return self._sandbox(request, hashlib.blake2b(text.encode(), digest_size=32).digest())

    def _arguments(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the arguments that transformers 5.23 passes to `render_jinja_template`."""
        tokenizer = self._wrapper._tokenizer
        listed = [dict(tool) for tool in tools] or None
        present = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        return {
            **tokenizer.special_tokens_map,
            **arguments,
            "conversations": [present],
            "tools": listed,
            "chat_template": tokenizer.get_chat_template(None, listed),
        }


def fold_late_systems(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of a conversation in which every system turn after the conversation's first
    turn is part of a user turn.
    """
    first, *rest = [dict(message) for message in messages]
    for turn in rest:
        if turn["role"] == "system":
            turn["role"] = "user"
    turns = []
    for role, run in groupby((first, *rest), key=itemgetter("role")):
        if role == "user":
            turns.append({"role": role, "content": "\n\n".join(turn["content"] for turn in run)})
        else:
            turns += run
    return turns


def _with_texts(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a turn with its calls' arguments encoded as JSON, as mlx-lm's functions expect."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(arguments)}}
        for call in turn.get("tool_calls") or ()
        for arguments in (call["function"]["arguments"],)
    ]
    return {**turn, "tool_calls": calls} if calls else turn


def _has_texts(text: str, turns: Sequence[Mapping[str, Any]]) -> bool:
    return all(str(turn["content"]).strip() in text for turn in turns)
