"""A model's chat template: a program from its checkpoint, of unbounded cost.

transformers runs it in jinja2's sandbox, which bounds its actions. Our own sandbox, a process ended
by a deadline or by its memory, bounds its cost. transformers' own function renders it there, so the
text is the same to the byte.
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

MOST_CHARS: Final = 1_000_000  # characters of a prompt beyond twice those of its parts
MOST_BYTES: Final = 1 << 29  # bytes of memory beyond eight times those characters
BUSY_S: Final = 2.0
HELLO: Final = ({"role": "user", "content": "Hello!"},)


class TemplateRefusal(BadRequest):
    """The template's own words against a conversation; it had enough time to render it."""


class ChatTemplate:
    """Renders conversations. Safe on any thread.

    Rendering happens in this process if there is no sandbox, or if mlx-lm brings a program of its
    own for the model instead of a template.
    """

    def __init__(self, wrapper: TokenizerWrapper, sandbox: Sandbox | None) -> None:
        self._wrapper: Any = wrapper
        self._sandbox = sandbox
        self.is_program = wrapper._chat_template is not None  # mlx-lm's, instead of a template
        # Hermes 3 and Command-R have several templates, by name: one of them shows tools.
        named = wrapper._tokenizer.chat_template or ""
        self.text = named if isinstance(named, str) else "\n".join(named.values())

    def has(self, word: str) -> bool:
        """Return True if a word is in the template, or may be in a program."""
        return self.is_program or word in self.text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
    ) -> str:
        """Return the text of `apply_chat_template` for these messages, tools and other arguments.

        System turns after the first turn are folded into user turns, at their places, if the
        template refuses or drops them there.

        Raises TemplateRefusal if the template refuses the conversation, BadRequest if rendering
        takes too much, Overloaded if other templates take all the time, and Unavailable if the
        system ended the process that rendered it, or gave it no processor.
        """
        outcome, value = self._render_once(messages, tools, arguments)
        # A template may raise at a late system turn, or drop it without an error.
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
        """Raise ModelLoadFailed if the template cannot render even a greeting within bounds.

        A template that refuses the greeting passes: it may want more than that.
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
        """Return the arguments of transformers 5.23 to `render_jinja_template`."""
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
    """Return a conversation whose system turns, except the first turn, are parts of user turns."""
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
    """Return a turn whose calls have their arguments in JSON, as mlx-lm's programs read them."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(arguments)}}
        for call in turn.get("tool_calls") or ()
        for arguments in (call["function"]["arguments"],)
    ]
    return {**turn, "tool_calls": calls} if calls else turn


def _has_texts(text: str, turns: Sequence[Mapping[str, Any]]) -> bool:
    return all(str(turn["content"]).strip() in text for turn in turns)
