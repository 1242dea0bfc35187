"""Tokens read ahead of their choice: one stream each with it, without it, and free."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import yaml

from benchmarks.checkpoints import HYBRID, SLIDING, write_chat
from benchmarks.targets.onboard import TOKENS
from benchmarks.targets.rig import SMOLLM2, SMOLLM2_PACKAGE, Rig, errors, rate, rest
from benchmarks.targets.verdicts import Target, Verdict, not_measured, ratio
from benchmarks.workloads import Form, chat
from gateway.bench.load import Peer
from gateway.bench.requests import Ask
from gateway.registry.sources import package_folder

FREE_STREAM = Target(
    "SmolLM2, entities by a schema / a free stream of as many tokens, tokens/s", 1.2
)
ENTITIES = Target("SmolLM2, entities by a schema: reading ahead / not, tokens/s")
REWRITING = Target("SmolLM2, a text rewritten: reading ahead / not, tokens/s", 1.3)
FREE = Target("SmolLM2, free chat: reading ahead / not, tokens/s", 0.97)
TINY: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sliding": SLIDING,
    "hybrid": HYBRID,
    "tiny plain": TINY,
    "tiny sliding": {**SLIDING, **TINY},
    "tiny hybrid": {**HYBRID, **TINY},
}
PEOPLE = ("Alice Johnson", "Robert Smith", "Carla Diaz", "Kofi Mensah", "Yuki Tanaka")
CITIES = ("Berlin", "Hamburg", "Lyon", "Accra", "Osaka")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "extracted_entities": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 40},
                    "entity_type_id": {"type": "integer", "minimum": 0, "maximum": 9},
                },
                "required": ["name", "entity_type_id"],
                "additionalProperties": False,
            },
            "minItems": 3,
            "maxItems": 5,
        }
    },
    "required": ["extracted_entities"],
    "additionalProperties": False,
}


async def speculation(rig: Rig) -> list[Verdict]:
    """The same requests to a gateway that reads ahead, as it does by default, and to one that
    does not, in turn.
    """
    if package_folder(SMOLLM2_PACKAGE) is None:
        return [not_measured("reading ahead", f"{SMOLLM2_PACKAGE} is not installed")]
    tokens = max(16, round(rig.seconds(TOKENS)))
    form = Form(SCHEMA)

    def rewriting(number: int) -> Ask:
        prompt = f"Write this text again, with every date in ISO form: {_story(number)}"
        return chat(SMOLLM2, prompt, max_tokens=tokens)

    def entities(number: int) -> Ask:
        prompt = f"List the people in this text. {_story(number)}"
        return chat(SMOLLM2, prompt, max_tokens=1024, form=form)

    def free(number: int) -> Ask:
        prompt = (
            f"Tell me something about {CITIES[number % 5]} that {PEOPLE[number % 4]} would like."
        )
        return chat(SMOLLM2, prompt, max_tokens=tokens)

    async with rig.gateway() as ahead, rig.gateway(GATEWAY_SPECULATE_ROWS="0") as plain:
        return [
            await _compare(rig, ENTITIES, entities, ahead, plain),
            await _compare(rig, FREE_STREAM, entities, ahead, ahead, other=free),
            await _compare(rig, REWRITING, rewriting, ahead, plain),
            await _compare(rig, FREE, free, ahead, plain),
        ]


async def kinds(rig: Rig) -> list[Verdict]:
    """Models of each kind of cache, with random weights: small and tiny ones, and of each a twin
    whose answers repeat themselves.
    """
    verdicts = []
    for name, shape in SHAPES.items():
        here = replace(rig, folder=rig.folder / name.replace(" ", "-"))
        write_chat(here.folder / "free", **shape)
        write_chat(here.folder / "repeating", repeats=32, **shape)
        entries = {
            model: {"kind": "chat", "source": f"path:{model}", "preload": True}
            for model in ("free", "repeating")
        }
        here.models.write_text(yaml.safe_dump({"version": 1, "models": entries}), encoding="utf-8")
        verdicts += await _compare_kind(here, name)
    return verdicts


async def _compare_kind(rig: Rig, name: str) -> list[Verdict]:
    tokens, form = max(64, round(rig.seconds(TOKENS))), Form(SCHEMA)

    def entities(number: int) -> Ask:
        return chat("free", _story(number), max_tokens=1024, form=form)

    def free(number: int) -> Ask:
        return chat("free", _story(number), max_tokens=tokens)

    def repeating(number: int) -> Ask:
        return chat("repeating", _story(number), max_tokens=tokens)

    stream = Target(f"{name}, entities by a schema / a free stream, tokens/s", 1.5)
    repeated = Target(f"{name}, a text that repeats itself: reading ahead / not, tokens/s", 1.3)
    fresh = Target(f"{name}, free text: reading ahead / not, tokens/s", 0.97)
    async with rig.gateway() as ahead, rig.gateway(GATEWAY_SPECULATE_ROWS="0") as plain:
        return [
            await _compare(rig, stream, entities, ahead, ahead, other=free),
            await _compare(rig, repeated, repeating, ahead, plain),
            await _compare(rig, fresh, free, ahead, plain),
        ]


async def _compare(
    rig: Rig,
    target: Target,
    make: Callable[[int], Ask],
    ahead: Peer,
    plain: Peer,
    *,
    other: Callable[[int], Ask] | None = None,
) -> Verdict:
    """Ask both in turn; of the first round, in which models are loaded, only errors count."""
    samples, wrong, tokens = [], 0, 0.0
    for number in range(rig.rounds + 1):
        with_it = await ahead.ask(make(number))
        await rest()
        without = await plain.ask((other or make)(number))
        await rest()
        wrong += errors([with_it, without])
        if number:
            samples.append(ratio(rate([with_it]), rate([without])))
            tokens += with_it.units
    return target.judge(samples, errors=wrong, note=f"{tokens / rig.rounds:.0f} tokens")


def _story(number: int) -> str:
    one, other = PEOPLE[number % 5], PEOPLE[(number + 2) % 5]
    city = CITIES[number % 5]
    return (
        f"On 3 May 2{number % 9}19 {one} met {other} at the {city} office. {one} gave {other} the "
        f"keys to the archive, and {other} thanked {one} before the train to {city} left on 4 May."
    )
