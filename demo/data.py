"""Conversations for demo-chat, made from a seed: what it learns from and what it is tested with.

Two sides that share no phrasing, no invented word and no pair of numbers: `held_out` says which.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from demo import facts
from demo.exchanges import (
    PLAIN_SKILLS,
    Message,
    Side,
    capital,
    greet,
    identity,
    no_tool,
    repeat,
    weather,
    which_city,
    words,
)
from demo.tools import call_text, draw_tools, other_tools
from demo.wordings import fill, pick
from demo.words import person

SKILLS = ("greet", "identity", "capital", "repeat", "weather", "result", "sum", "extract")

_WEATHER_WEIGHT = 20


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation; the last message is the assistant's right answer."""

    skill: str
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)

    @property
    def prompt(self) -> list[Message]:
        """What the model is given."""
        return self.messages[:-1]

    @property
    def answer(self) -> str:
        """The right answer as the model must write it, tool markup included."""
        return self.messages[-1].get("content") or call_text(self.messages[-1])


def _system(side: Side, odds: float) -> list[Message]:
    """No system turn, or one or two sentences of one; rarely a long one."""
    rng = side.rng
    if rng.random() > odds:
        return []
    texts = side.phrasings.surroundings["system"]
    count = rng.choice((1, 1, 1, 2, 3)) if rng.random() < 0.98 else rng.randint(4, 24)
    text = " ".join(pick(rng, texts) for _ in range(count))
    while "<words>" in text:
        text = text.replace("<words>", words(side, 6), 1)
    return [{"role": "system", "content": fill(text, name=person(rng, side.held_out))}]


def conversation(rng: random.Random) -> Case:
    """One conversation to learn from: one to three exchanges of mixed skills."""
    side = Side(rng, held_out=False)
    names, weights = list(PLAIN_SKILLS), [weight for _, weight in PLAIN_SKILLS.values()]
    argument, tools = draw_tools(rng) if rng.random() < 0.25 else (None, [])
    if not tools and rng.random() < 0.03:
        tools = other_tools(rng)
    messages = _system(side, 0.5)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        total = sum(weights) + _WEATHER_WEIGHT
        if argument and rng.random() < 0.7:
            exchange = weather(side, argument)
            if rng.random() < 0.08:
                messages += which_city(side, argument)
                break
            if rng.random() < 0.3:
                messages += exchange[:2]
                break
            messages += exchange
        elif not argument and rng.random() < 2 / total:
            messages += no_tool(side)
        else:
            messages += PLAIN_SKILLS[rng.choices(names, weights)[0]][0](side)
    return Case("mixed", messages, tools)


def conversations(seed: int) -> Iterator[Case]:
    """Endless training conversations, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        yield conversation(rng)


def held_out_cases(skill: str, count: int, seed: int = 1) -> list[Case]:
    """Test cases of one skill: held-out phrasings, words and numbers, some after another turn."""
    side = Side(random.Random(f"{skill} {seed}"), held_out=True)
    return [_held_out_case(side, skill, number) for number in range(count)]


def _held_out_case(side: Side, skill: str, number: int) -> Case:
    tools: list[dict[str, Any]] = []
    messages = _system(side, 0.4)
    if side.rng.random() < 0.25:
        messages += side.rng.choice((greet, identity, capital, repeat))(side)
    if skill in ("weather", "result"):
        argument, tools = draw_tools(side.rng, argument="city")
        exchange = weather(side, argument)
        messages += exchange if skill == "result" else exchange[:2]
    elif skill == "capital":
        countries = list(facts.CAPITALS)
        messages += capital(side, countries[number % len(countries)])
    else:
        messages += PLAIN_SKILLS[skill][0](side)
    return Case(skill, messages, tools)
