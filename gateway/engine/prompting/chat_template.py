"""A model's chat template, a Jinja program of unknown cost that runs in the sandbox."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from mlx_lm.tokenizer_utils import TokenizerWrapper

from gateway.engine.sandbox_worker import Sandbox
from gateway.errors import BadRequest, ModelLoadFailed, Overloaded, Unavailable

MOST_CHARS: Final = 1_000_000  # rendered characters, plus two per input character
MOST_BYTES: Final = 1 << 29  # bytes of memory, plus eight per input character
BUSY_S: Final = 2.0  # seconds until a retry, if the sandbox is busy
HELLO: Final = ({"role": "user", "content": "Hello!"},)


class TemplateRefusal(BadRequest):
    """The template refused a conversation by raising an error."""


class ChatTemplate:
    """A model's chat template, safe on any thread."""

    def __init__(self, wrapper: TokenizerWrapper, sandbox: Sandbox | None) -> None:
        self._wrapper: Any = wrapper
        self._sandbox = sandbox
        # Some models have a Python function in mlx-lm instead of a Jinja template.
        self.is_program = wrapper._chat_template is not None
        # Hermes 3 and Command-R have several named templates.
        named = wrapper._tokenizer.chat_template or ""
        self.text = named if isinstance(named, str) else "\n".join(named.values())

    def has(self, word: str) -> bool:
        """Return True if the template is a program or contains a word."""
        return self.is_program or word in self.text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
    ) -> str:
        """Render messages as transformers' `apply_chat_template` does.

        Raises TemplateRefusal, BadRequest if this takes too much time or memory, Overloaded if the
        sandbox is busy, and Unavailable if the system killed the process or gave it no CPU time.
        """
        outcome, value = self._render_once(messages, tools, arguments)
        # A template may refuse a late system turn or silently drop it.
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
        """Raise ModelLoadFailed if rendering a greeting exceeds the limits of time or memory."""
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
        except Exception as error:
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
    """Return a conversation with all late system turns as parts of user turns."""
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
    """Return a turn with calls' arguments as JSON, which mlx-lm's functions expect."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(arguments)}}
        for call in turn.get("tool_calls") or ()
        for arguments in (call["function"]["arguments"],)
    ]
    return {**turn, "tool_calls": calls} if calls else turn


def _has_texts(text: str, turns: Sequence[Mapping[str, Any]]) -> bool:
    return all(str(turn["content"]).strip() in text for turn in turns)
