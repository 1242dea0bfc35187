"""The form in which a chat template expects thoughts in earlier turns, found by rendering made-up
turns.

Templates render thoughts only in some turns: in an answer after a tool's result, in a turn with a
call, or in any last answer. gpt-oss's template refuses a turn with a thought, a text and a call.
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
"""Returns a turn with a thought added, in the form that a template expects."""

THOUGHT_KEY: Final = "reasoning_content"  # the thought's key in a job's turns and most templates
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
"""Made-up conversations in whose last turns a template may show a thought."""


def trial_job(turns: Sequence[Turn]) -> GenerateJob:
    """Return a job with a made-up conversation, in which the model may think and call FUNCTION."""
    function = {"name": FUNCTION.name, "description": "", "parameters": FUNCTION.parameters}
    return GenerateJob(
        caller=Caller(request_id="trial", deadline=math.inf, allowed_s=math.inf),
        messages=turns,
        tools=[{"type": "function", "function": function}],
        template_args={"enable_thinking": True},
        sampling=Sampling(),
    )


def put_as(key: str) -> PutThought:
    """Return a function that adds a thought to a turn under the key `key`."""
    return lambda turn, thought: {**turn, key: thought}


_PUT: Final = put_as(THOUGHT_KEY)


def _put_alone(put: PutThought) -> PutThought:
    """Return a function that adds thoughts with `put`, except to turns with both text and calls."""
    return lambda turn, thought: (
        turn if turn.get("content") and turn.get("tool_calls") else put(turn, thought)
    )


def _put_as_part(turn: Turn, thought: str) -> Turn:
    """Add a thought as a part of the content, as Mistral's templates expect it."""
    text = turn.get("content")
    parts = [{"type": "text", "text": text}] if text else []
    return {**turn, "content": [{"type": "thinking", "thinking": thought}, *parts]}


# Pairs of a word that a template must contain to read thoughts in a form, and the function that
# adds a thought to a turn in this form.
_FORMS: Final[Sequence[tuple[str, PutThought]]] = (
    (THOUGHT_KEY, put_as(THOUGHT_KEY)),
    ("reasoning", put_as("reasoning")),
    ("thinking", put_as("thinking")),
    ("thinking", _put_as_part),
)


def may_show_thoughts(template: ChatTemplate) -> bool:
    """Return True if a template contains one of the words needed to read thoughts."""
    return any(template.has(word) for word, _ in _FORMS)


@dataclass(frozen=True, slots=True)
class Form:
    """The form in which a template expects its model's earlier answers.

    A template may write a line break after a thought, or between a text and a call. A line break
    that the model wrote there is then removed: with both line breaks, the prompt would differ from
    the tokens that the model wrote, and the prefix cache would miss.
    """

    put: PutThought = _PUT
    breaks_thoughts: bool = False
    breaks_texts: bool = False

    def turn(self, turn: Turn, thought: str) -> tuple[Turn, str]:
        """Return a turn and its thought without the line breaks that the template writes."""
        text = turn.get("content")
        if self.breaks_texts and turn.get("tool_calls") and isinstance(text, str):
            turn = {**turn, "content": text.rstrip("\n")}
        return turn, thought.rstrip("\n") if self.breaks_thoughts else thought


def find_form(template: ChatTemplate, render: Callable[[Sequence[Turn]], str | None]) -> Form:
    """Return the form in which a template expects turns; the default if it renders no thoughts.

    `render` returns the text of a conversation, or None if the template refuses it.
    """
    talk = (render([_ASKED, _TALKING]) if template.has("tool_calls") else None) or ""
    breaks_texts = f"{_TALKING['content']}\n" in talk
    for word, put in _FORMS:
        for *earlier, last in ANSWERING if template.has(word) else ():
            text = render([*earlier, put(last, THOUGHT)]) or ""
            # A template that doesn't know content parts may print the list of them as text.
            if THOUGHT in text and not any(f"{mark}thinking{mark}:" in text for mark in "'\""):
                is_refused = talk and render([_ASKED, put(_TALKING, THOUGHT)]) is None
                put = _put_alone(put) if is_refused else put
                return Form(put, f"{THOUGHT}\n" in text, breaks_texts)
    return Form(breaks_texts=breaks_texts)
