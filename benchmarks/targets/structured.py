"""Grammar-bound answers: many together, and one beside a free one."""

from typing import Any

from benchmarks.targets.rig import CHAT, Rig, errors, rate, rest
from benchmarks.targets.verdicts import Target, Verdict, ratio
from benchmarks.workloads import PERSON, Form, burst, chat
from gateway.bench.requests import Ask, Workload

REQUESTS = 18
ROWS = 16
TOGETHER = Target(
    f"{REQUESTS} structured requests, rows = {ROWS} / rows = 1, every answer valid", 3
)
STREAM = Target("one structured stream / one free stream, tokens/s", 0.9)
ROOM = 1024  # tokens: an answer ends where its schema ends
LINES: dict[str, Any] = {
    "type": "object",
    "properties": {
        "lines": {
            "type": "array",
            "items": {"type": "string", "minLength": 20, "maxLength": 40},
            "minItems": 12,
            "maxItems": 12,
        }
    },
    "required": ["lines"],
    "additionalProperties": False,
}


async def together(rig: Rig) -> list[Verdict]:
    """The same requests at once, to a gateway that decodes them in turn and one that does not."""
    form = Form(PERSON)
    samples, wrong = [], 0
    async with (
        rig.gateway(GATEWAY_STRUCTURED_ROWS="1") as single,
        rig.gateway(GATEWAY_STRUCTURED_ROWS=str(ROWS)) as many,
    ):
        for number in range(rig.rounds + 1):
            in_turn = await burst(single, _asks(rig, form), REQUESTS if number else 1)
            await rest()
            at_once = await burst(many, _asks(rig, form), REQUESTS if number else 1)
            await rest()
            wrong += errors(in_turn) + errors(at_once)
            if number:  # round 0 compiles the schema
                samples.append(ratio(rate(at_once), rate(in_turn)))
    return [TOGETHER.judge(samples, errors=wrong)]


async def stream(rig: Rig) -> list[Verdict]:
    """A stream bound to a schema, then a free one of as many tokens."""
    form = Form(LINES)
    samples, wrong, lengths = [], 0, []
    async with rig.gateway() as peer:
        for number in range(rig.rounds + 1):
            bound = await peer.ask(_asks(rig, form, is_streamed=True).next())
            await rest()
            free = await peer.ask(rig.chats(max(1, bound.units)).next())
            await rest()
            wrong += errors([bound, free])
            if number:
                samples.append(ratio(rate([bound]), rate([free])))
                lengths.append(bound.units)
    return [STREAM.judge(samples, errors=wrong, note=f"{lengths[0]} tokens")]


def _asks(rig: Rig, form: Form, *, is_streamed: bool = False) -> Workload:
    prompts = rig.wording(CHAT).prompts

    def make(number: int) -> Ask:
        return chat(CHAT, prompts[number], max_tokens=ROOM, form=form, is_streamed=is_streamed)

    return Workload(make)
