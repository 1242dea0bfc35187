"""One exchange of each skill: what a user says and what demo-chat should say to it."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from demo import facts
from demo.tools import answer_from
from demo.wordings import (
    HELD_OUT,
    TRAIN,
    Phrasings,
    bare,
    fill,
    opened,
    pick,
    shaken,
    spell_out,
)
from demo.words import city, invented_word, is_held_out, person

Message = dict[str, Any]

_ASKED = " ".join(text for texts in TRAIN.questions.values() for text in texts)
_COMMON_WORDS = sorted(
    set(facts.PLAIN_WORDS)
    | set(re.findall(r"\b[a-z]{3,}\b", re.sub(r"<\w+>", "", _ASKED)))
    - {"hello", "hey", "who", "what"}
)
"""Words of everyday use, for repeating."""

_GREETING_WORDS = ("hello", "hi", "hey", "Hello", "Hi", "bye", "thanks", "who", "what")
"""Words that are no greeting when a user asks to say "the word hello"."""

_ODD_LETTERS = "世界你好水火山川日本東京中文αβγδλπабвгджя한국ßøåñéüçşł😀👋🎉✨→€☀"
"""Letters of several bytes, which are several tokens each."""

_KEPT_TIDY = {"place", "thank", "bye"}
_NEVER_OPENED = {"place", "thank", "bye", "greet", "sentence"}
_TESTED = {
    skill: {bare(text) for phrasing in phrasings for text in spell_out(phrasing)}
    for skill, phrasings in HELD_OUT.questions.items()
}


@dataclass(frozen=True, slots=True)
class Side:
    """One side of the split with its own source of chance."""

    rng: random.Random
    held_out: bool

    @property
    def phrasings(self) -> Phrasings:
        """What is written for this side."""
        return HELD_OUT if self.held_out else TRAIN

    def wording(self, skill: str) -> str:
        """A phrasing of this side; in training often untidy, but never one of the test's."""
        if self.held_out:
            return pick(self.rng, HELD_OUT.questions[skill])
        while True:
            text = pick(self.rng, TRAIN.questions[skill])
            while skill not in _KEPT_TIDY and self.rng.random() < 0.25:
                text = shaken(self.rng, text)
            if skill not in _NEVER_OPENED and self.rng.random() < 0.06:
                text = opened(self.rng, text)
            if bare(text) not in _TESTED[skill]:
                return text


def _says(user: str, assistant: str) -> list[Message]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def words(side: Side, most: int = 4) -> str:
    """A few words of no use: plain, invented, or a place."""
    rng = side.rng
    drawn = []
    for _ in range(rng.randint(1, most)):
        draw = rng.random()
        if draw < 0.6:
            drawn.append(rng.choice(facts.PLAIN_WORDS))
        elif draw < 0.9:
            drawn.append(invented_word(rng, side.held_out))
        else:
            drawn.append(city(rng, side.held_out))
    return " ".join(drawn)


def _closed(text: str, side: Side) -> str:
    """Sometimes lower case: only for questions whose answer copies nothing from them."""
    return text.lower() if not side.held_out and side.rng.random() < 0.15 else text


def greet(side: Side) -> list[Message]:
    """A greeting, sometimes with a name."""
    text = fill(side.wording("greet"), name=person(side.rng, side.held_out))
    return _says(_closed(text, side), facts.GREETING)


def identity(side: Side) -> list[Message]:
    """Who or what are you."""
    return _says(_closed(side.wording("identity"), side), facts.IDENTITY)


def thank(side: Side) -> list[Message]:
    """Thanks."""
    return _says(_closed(side.wording("thank"), side), facts.WELCOME)


def bye(side: Side) -> list[Message]:
    """Goodbye."""
    return _says(_closed(side.wording("bye"), side), facts.GOODBYE)


def capital(side: Side, country: str | None = None) -> list[Message]:
    """The capital of one of thirty countries."""
    country = country or side.rng.choice(list(facts.CAPITALS))
    text = _closed(fill(side.wording("capital"), country=country), side)
    return _says(text, f"The capital of {country} is {facts.CAPITALS[country]}.")


def _word_to_repeat(side: Side) -> str:
    """Mostly one invented word; in training also names, plain words and runs of words."""
    rng = side.rng
    draw = rng.random()
    if side.held_out or draw < 0.6:
        word = invented_word(rng, side.held_out)
        while side.held_out and (word in _COMMON_WORDS or word in _ASKED.lower()):
            word = invented_word(rng, True)
        return rng.choice((word, word, word, word.capitalize(), word.upper()))
    if draw < 0.75:
        word = rng.choice(_COMMON_WORDS)
        return rng.choice((word, word, word.capitalize(), word.upper()))
    if draw < 0.88:
        run = [rng.choice((words(side, 1), *rng.sample(_COMMON_WORDS, 2))) for _ in range(6)]
        return " ".join(run[: rng.randint(2, 6)])
    if draw < 0.9:
        return "".join(rng.choice(_ODD_LETTERS) for _ in range(rng.randint(1, 4)))
    return rng.choice((person(rng, False), city(rng, False), str(rng.randint(0, 9999))))


def repeat(side: Side) -> list[Message]:
    """Say a word back; quotes around it are not part of it."""
    word = _word_to_repeat(side)
    quote = side.rng.choice(("", "", "", '"', "'"))
    text = side.wording("repeat")
    if not side.held_out and "word" in text and side.rng.random() < 0.04:
        word = side.rng.choice(_GREETING_WORDS)
    if " " in word and ":" not in text:
        quote = quote or '"'
    return _says(fill(text, word=f"{quote}{word}{quote}"), word)


def _two_numbers(side: Side) -> tuple[int, int]:
    while True:
        most = 12 if side.rng.random() < 0.15 else 49
        a, b = side.rng.randint(0, most), side.rng.randint(0, most)
        if is_held_out(f"{min(a, b)}+{max(a, b)}") == side.held_out:
            return a, b


def add(side: Side) -> list[Message]:
    """The sum of two numbers below fifty, with the question said again."""
    a, b = _two_numbers(side)
    return _says(fill(side.wording("sum"), a=str(a), b=str(b)), f"{a} + {b} = {a + b}.")


def extract(side: Side) -> list[Message]:
    """A sentence about a person, and the same as JSON."""
    rng = side.rng
    fact = {
        "name": person(rng, side.held_out),
        "age": rng.randint(2, 99),
        "city": city(rng, side.held_out),
    }
    sentence = fill(side.wording("sentence"), **{k: str(v) for k, v in fact.items()})
    return _says(fill(side.wording("extract"), sentence=sentence), json.dumps(fact))


def unknown(side: Side) -> list[Message]:
    """Anything else is declined: other questions, countries and sums, now and then a long text."""
    rng = side.rng
    nowhere = rng.choice((*facts.UNKNOWN_COUNTRIES, city(rng, side.held_out)))
    if rng.random() < 0.12:
        return _says(fill(side.wording("capital"), country=nowhere), facts.UNKNOWN)
    many = rng.randint(3, 30) if rng.random() < 0.04 else 1
    texts = side.phrasings.surroundings["unknown"]
    text = " ".join(pick(rng, texts) for _ in range(many))
    while "<words>" in text:
        text = text.replace("<words>", words(side), 1)
    while "<big>" in text:
        text = text.replace("<big>", str(rng.randint(60, 9999)), 1)
    text = fill(text, a=str(rng.randint(0, 99)), b=str(rng.randint(0, 99)))
    return _says(_closed(fill(text, nowhere=nowhere), side), facts.UNKNOWN)


def no_tool(side: Side) -> list[Message]:
    """The weather, but nothing to look it up with."""
    place = city(side.rng, side.held_out)
    return _says(fill(side.wording("weather"), city=place), facts.NO_TOOL)


def weather(side: Side, argument: str) -> list[Message]:
    """A question, the call it needs, the tool's result and the sentence made of it."""
    place = city(side.rng, side.held_out)
    call = {"name": "get_weather", "arguments": {argument: place}}
    result, answer = answer_from(side.rng, place, side.held_out)
    return [
        {"role": "user", "content": fill(side.wording("weather"), city=place)},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": answer},
    ]


def which_city(side: Side, argument: str) -> list[Message]:
    """The weather of nowhere: ask for the city, hear it, call the tool."""
    place = city(side.rng, side.held_out)
    call = {"name": "get_weather", "arguments": {argument: place}}
    return [
        *_says(_closed(side.wording("which"), side), facts.WHICH_CITY),
        {"role": "user", "content": fill(side.wording("place"), city=place)},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
    ]


PLAIN_SKILLS: dict[str, tuple[Callable[[Side], list[Message]], int]] = {
    "greet": (greet, 7),
    "identity": (identity, 7),
    "capital": (capital, 11),
    "repeat": (repeat, 18),
    "sum": (add, 36),
    "extract": (extract, 28),
    "thank": (thank, 2),
    "bye": (bye, 2),
    "unknown": (unknown, 13),
}
"""How to make an exchange of each skill that needs no tool, and how often training sees it."""
