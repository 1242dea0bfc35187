"""The tools a conversation may offer, the calls to them and what comes back."""

import json
import random
from typing import Any

from demo import facts
from demo.wordings import HELD_OUT, TRAIN, fill, pick
from demo.words import invented_word

_DESCRIPTIONS = (
    "", "Get the weather", "Get the weather for a city", "Get the current weather in a city.",
    "Returns the weather of a city.", "Current weather", "Look up the weather", "The weather now.",
    "Get current temperature and sky for a given location.", "Weather report for a place",
)  # fmt: skip
_ARGUMENTS = ("city", "city", "city", "city", "location", "place", "town", "city_name", "where")
_OTHERS = (
    ("get_time", "Get the time in a city", ("city",)),
    ("search", "Search the web", ("query",)),
    ("add", "Add two numbers", ("a", "b")),
    ("send_mail", "Send a mail", ("to", "text")),
    ("get_news", "Latest news", ("topic",)),
    ("book_flight", "Book a flight to a city.", ("city", "date")),
    ("translate", "Translate a text", ("text", "language")),
)


def _tool(name: str, description: str, arguments: tuple[str, ...]) -> dict[str, Any]:
    """A tool as OpenAI's API declares it, every argument a required string."""
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = {
        "type": "object",
        "properties": {argument: {"type": "string"} for argument in arguments},
        "required": list(arguments),
    }
    return {"type": "function", "function": function}


def other_tools(rng: random.Random) -> list[dict[str, Any]]:
    """One or two tools that know nothing of the weather."""
    return [_tool(*other) for other in rng.sample(_OTHERS, rng.randint(1, 2))]


def draw_tools(rng: random.Random, argument: str | None = None) -> tuple[str, list[dict[str, Any]]]:
    """The name of get_weather's argument, and get_weather alone or among other tools."""
    argument = argument or rng.choice(_ARGUMENTS)
    others = other_tools(rng) if rng.random() < 0.25 else []
    extra = ("unit",) if rng.random() < 0.1 else ()
    tools = [_tool("get_weather", rng.choice(_DESCRIPTIONS), (argument, *extra)), *others]
    rng.shuffle(tools)
    return argument, tools


def call_text(message: dict[str, Any]) -> str:
    """The assistant's tool call as the model writes it."""
    function = message["tool_calls"][0]["function"]
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>"


def answer_from(rng: random.Random, place: str, held_out: bool) -> tuple[str, str]:
    """A weather result for a place, and the sentence to say about it."""
    degrees = str(rng.randint(-15, 42))
    if rng.random() < 0.1:
        degrees += f".{rng.randint(1, 9)}"
    sky = rng.choice(facts.CONDITIONS) if rng.random() < 0.7 else invented_word(rng, held_out)
    side = HELD_OUT if held_out else TRAIN
    form = pick(rng, side.surroundings["result"])
    result = fill(form, city=place, t=degrees, c=sky, n=str(rng.randint(0, 99)))
    return result, f"It is {degrees} degrees and {sky} in {place}."
