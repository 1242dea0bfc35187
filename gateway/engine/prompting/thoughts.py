"""The form in which a chat template expects thoughts, found by rendering made-up turns.

Templates render thoughts only after a tool's result, with a call, or in the last answer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from gateway.engine.prompting.chat_template import ChatTemplate
from gateway.jobs import Caller
from gateway.jobs.chat import Function, GenerateJob, Sampling

Turn: TypeAlias = Mapping[str, Any]
PutThought: TypeAlias = Callable[[Turn, str], Turn]
"""A function that adds a thought to a turn, in the form that a template expects."""

THOUGHT_KEY: Final = "reasoning_content"  # in jobs and most templates
THOUGHT: Final = "The tide turns at seven."
ARGUMENTS: Final[Mapping[str, Any]] = {"harbour": "Old Whitby", "days": 3}
FUNCTION: Final = Function(
    "look_up_tide",
    {
        "type": "object",
        "properties": {"harbour": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["harbour", "days"],
    },
)
_CALL: Final = {"name": FUNCTION.name, "arguments": ARGUMENTS}
_CALLS: Final = [{"id": "call_0", "type": "function", "function": _CALL}]
_ASKED: Final[Turn] = {"role": "user", "content": "When do we sail?"}
_CALLING: Final[Turn] = {"role": "assistant", "content": "", "tool_calls": _CALLS}
_TALKING: Final[Turn] = {**_CALLING, "content": "Let me look."}
_FOUND: Final[Turn] = {"role": "tool", "content": "Slack water.", "tool_call_id": "call_0"}
_ANSWERING: Final[Turn] = {"role": "assistant", "content": "Sail at eight."}
CALLING: Final = (_ASKED, _CALLING)
ANSWERING: Final = ((_ASKED, _CALLING, _FOUND, _ANSWERING), CALLING, (_ASKED, _ANSWERING))
"""Made-up conversations whose last turn may show a thought."""


def trial_job(turns: Sequence[Turn]) -> GenerateJob:
    function = {"name": FUNCTION.name, "description": "", "parameters": FUNCTION.parameters}
    return GenerateJob(
        caller=Caller(request_id="trial", deadline=math.inf, allowed_s=math.inf),
        messages=turns,
        tools=[{"type": "function", "function": function}],
        template_args={"enable_thinking": True},
        sampling=Sampling(),
    )


def put_as(key: str) -> PutThought:
    return lambda turn, thought: {**turn, key: thought}


_PUT: Final = put_as(THOUGHT_KEY)


def _put_alone(put: PutThought) -> PutThought:
    """Return a function that adds thoughts with `put`, except to turns with both text and calls."""
    return lambda turn, thought: (
        turn if turn.get("content") and turn.get("tool_calls") else put(turn, thought)
    )


def _put_as_part(turn: Turn, thought: str) -> Turn:
    """Add a thought as a content part, for Mistral's templates."""
    text = turn.get("content")
    parts = [{"type": "text", "text": text}] if text else []
    return {**turn, "content": [{"type": "thinking", "thinking": thought}, *parts]}


# Words that a template must contain for a form, and the form's function.
_FORMS: Final[Sequence[tuple[str, PutThought]]] = (
    (THOUGHT_KEY, put_as(THOUGHT_KEY)),
    ("reasoning", put_as("reasoning")),
    ("thinking", put_as("thinking")),
    ("thinking", _put_as_part),
)


def may_show_thoughts(template: ChatTemplate) -> bool:
    return any(template.has(word) for word, _ in _FORMS)


@dataclass(frozen=True, slots=True)
class Form:
    """The form in which a template expects earlier answers.

    If the template and the model both wrote a line break, the prefix cache would miss.
    """

    put: PutThought = _PUT
    breaks_thoughts: bool = False  # the template breaks the line after a thought
    breaks_texts: bool = False  # the template breaks the line between a text and a call

    def turn(self, turn: Turn, thought: str) -> tuple[Turn, str]:
        """Return a turn and its thought without the line breaks that the template writes."""
        text = turn.get("content")
        if self.breaks_texts and turn.get("tool_calls") and isinstance(text, str):
            turn = {**turn, "content": text.rstrip("\n")}
        return turn, thought.rstrip("\n") if self.breaks_thoughts else thought


def find_form(template: ChatTemplate, render: Callable[[Sequence[Turn]], str | None]) -> Form:
    """Return the form that a template expects, or the default if it renders no thoughts.

    `render` returns a conversation's text, or None if the template refuses it.
    """
    talk = (render([_ASKED, _TALKING]) if template.has("tool_calls") else None) or ""
    breaks_texts = f"{_TALKING['content']}\n" in talk
    for word, put in _FORMS:
        for *earlier, last in ANSWERING if template.has(word) else ():
            text = render([*earlier, put(last, THOUGHT)]) or ""
            # A template without support for content parts may print them as a list.
            if THOUGHT in text and not any(f"{mark}thinking{mark}:" in text for mark in "'\""):
                is_refused = talk and render([_ASKED, put(_TALKING, THOUGHT)]) is None
                put = _put_alone(put) if is_refused else put
                return Form(put, f"{THOUGHT}\n" in text, breaks_texts)
    return Form(breaks_texts=breaks_texts)
