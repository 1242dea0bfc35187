"""A chat template's own turns, read back by the formats that were inferred of it.

A template that refuses a turn, or leaves out its thought or its call, gives no verdict.
"""

import json
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from gateway.engine.prompting.chat_template import TemplateRefusal
from gateway.engine.prompting.chat_tokenizer import ChatTokenizer, count_alike
from gateway.engine.prompting.thoughts import (
    ANSWERING,
    ARGUMENTS,
    CALLING,
    FUNCTION,
    THOUGHT,
    THOUGHT_KEY,
    Turn,
    may_show_thoughts,
    trial_job,
)
from gateway.jobs import Calling, Sampling, SequenceParams


def list_unread(chat: ChatTokenizer) -> list[str]:
    """Return which formats do not read what the model's template writes, by the settings that name
    them: `tool_parser`, `reasoning_parser`. Slow: the template is rendered several times.
    """
    unread = []
    if chat.template.has("tool_calls"):
        written, _, calls = _read_back(chat, CALLING)
        is_shown = all(str(each) in written for each in (FUNCTION.name, *ARGUMENTS.values()))
        if is_shown and calls != [(FUNCTION.name, ARGUMENTS)]:
            unread.append("tool_parser")
    for *earlier, last in ANSWERING if may_show_thoughts(chat.template) else ():
        written, thought, _ = _read_back(chat, [*earlier, {**last, THOUGHT_KEY: THOUGHT}])
        if THOUGHT in written and thought.strip() != THOUGHT:
            return [*unread, "reasoning_parser"]
    return unread


def _read_back(chat: ChatTokenizer, turns: Sequence[Turn]) -> tuple[str, str, list[Any]]:
    """Return what the template writes of the last turn, and the thought and the calls in it."""
    try:
        text = chat.try_out(lambda: chat.apply(trial_job(turns), is_asking=False))
        asked, opening = chat.try_out(lambda: chat.render(trial_job(turns[:-1])))
    except TemplateRefusal:
        return "", "", []
    begin = count_alike(text, asked)
    for mark in (*chat.answers.reasoning.starts, *chat.answers.reasoning.ends):
        place = asked.rfind(mark)
        if place < begin < place + len(mark):  # the turn begins otherwise, with the same letters
            begin = place
    prompt = chat.begin(opening[: max(0, len(opening) - len(asked) + begin)], [])
    row = SequenceParams(
        prompt=prompt.ids,
        max_tokens=len(text),
        sampling=Sampling(),
        calling=Calling(functions=[FUNCTION]),
        is_thinking=prompt.is_thinking,
        may_think=prompt.may_think,
        opening=prompt.opening,
    )
    output = chat.answers.output_processor(row)
    ids = takewhile(lambda token: token not in chat.answers.eos_ids, chat.encode(text[begin:]))
    parts = [part for token in ids for part in output.push(token, None, is_shown_as_text=True)]
    parts += output.finish()
    calls = [(part.call.name, json.loads(part.call.arguments)) for part in parts if part.call]
    return text[begin:], "".join(part.reasoning for part in parts), calls
