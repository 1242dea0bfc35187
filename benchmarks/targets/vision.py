"""Chat about images: the gateway beside mlx-vlm's server, and a later turn beside one of text."""

import asyncio
import json
import math
from collections.abc import Sequence
from itertools import count
from statistics import median
from typing import Any, Final

import yaml

from benchmarks import servers
from benchmarks.raw_client import Streamed, stream_all
from benchmarks.seeing import IMAGE_TOKENS, picture, write_seeing_chat
from benchmarks.targets.rig import Rig, rest
from benchmarks.targets.verdicts import Target, Verdict, ratio
from gateway.bench.load import Peer
from gateway.bench.requests import WORDS, Ask, Texts, count_tokens

SEEING: Final = "seeing"
TOKENS: Final = 32
TIMEOUT_S: Final = 600.0
DISTINCT: Final = {
    streams: Target(f"tokens/s, a new 640 × 480 image each, streams: {streams}; / mlx-vlm", least)
    for streams, least in ((1, 1.0), (8, 1.5))
}
SHARED: Final = Target("tokens/s, 8 questions at once about a new image; / mlx-vlm", 3.0)
LATER: Final = Target(
    "third turn's first token, image in the first / as many text tokens", at_most=1.15
)


async def vision(rig: Rig) -> list[Verdict]:
    """Both servers in turn, in each round; both multiply by the same OpenBLAS."""
    if rig.mlx_vlm is None:
        raise servers.DidNotStart("say where mlx-vlm's Python is: --mlx-vlm FILE")
    model = write_seeing_chat(rig.folder / SEEING)
    entries = {SEEING: {"kind": "chat", "source": f"path:{SEEING}", "preload": True}}
    models = rig.folder / "seeing.yaml"
    models.write_text(yaml.safe_dump({"version": 1, "models": entries}), encoding="utf-8")
    seeds = count()
    async with servers.gateway(models) as ours, servers.mlx_vlm(rig.mlx_vlm, model) as theirs:
        sides = (ours, SEEING), (theirs, str(model))
        verdicts = [
            await _compare(rig, sides, target, seeds, streams, images=streams)
            for streams, target in DISTINCT.items()
        ]
        verdicts.append(await _compare(rig, sides, SHARED, seeds, 8, images=1))
        async with Peer(ours, timeout_s=TIMEOUT_S) as peer:
            verdicts.append(await _later_turn(rig, peer, seeds))
    return verdicts


async def _compare(
    rig: Rig,
    sides: Sequence[tuple[str, str]],
    target: Target,
    seeds: "count[int]",
    streams: int,
    images: int,
) -> Verdict:
    """Send all streams at once to one server and to the other. The first round is not counted."""
    rates: list[list[float]] = []
    for _ in range(rig.rounds + 1):
        shown = [picture(next(seeds)) for _ in range(images)]
        texts = Texts(next(seeds), [8])
        asked = [(shown[n % images], texts[n]) for n in range(streams)]
        pair = []
        for url, model in sides:
            bodies = [_body(model, [_turn(image, text)], TOKENS) for image, text in asked]
            pair.append(_rate(await asyncio.to_thread(stream_all, url, bodies, TIMEOUT_S)))
            await rest()
        rates.append(pair)
    own, other = zip(*rates[1:], strict=True)
    note = f"{median(own):.1f} / {median(other):.1f} tokens/s"
    wrong = sum(rate == 0 for rate in (*own, *other))
    return target.judge(list(map(ratio, own, other)), errors=wrong, note=note)


def _rate(streamed: Streamed) -> float:
    """Return tokens/s, or 0 if an answer is missing."""
    return 0.0 if None in streamed.tokens or streamed.token_s is None else 1 / streamed.token_s


async def _later_turn(rig: Rig, peer: Peer, seeds: "count[int]") -> Verdict:
    """Continue a conversation twice, and time the first token of the third turn."""
    waits: dict[bool, list[float]] = {True: [], False: []}
    wrong = 0
    for number in range(rig.rounds + 1):
        for has_image in (True, False) if number % 2 else (False, True):
            seed = next(seeds)
            text = Texts(seed, [8])[0]
            # A word of the benchmark's texts is a token.
            padding = " ".join(WORDS[(seed + n) % len(WORDS)] for n in range(IMAGE_TOKENS))
            turns = [
                _turn(picture(seed), text) if has_image else _said("user", f"{padding} {text}")
            ]
            for turn in range(3):
                answer = await peer.ask(
                    Ask(
                        "/chat/completions",
                        _body(SEEING, turns, TOKENS),
                        count_tokens,
                        is_streamed=True,
                    )
                )
                wrong += answer.error is not None
                turns += [_said("assistant", "yes and"), _said("user", Texts(seed, [8])[turn + 1])]
            if number:
                waits[has_image].append(answer.first if answer.arrivals else math.inf)
            await rest()
    with_image, with_text = waits[True], waits[False]
    note = f"{1000 * median(with_image):.0f} / {1000 * median(with_text):.0f} ms"
    return LATER.judge(list(map(ratio, with_image, with_text)), errors=wrong, note=note)


def _turn(image: str, text: str) -> Any:
    return _said(
        "user",
        [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": text}],
    )


def _said(role: str, content: Any) -> Any:
    return {"role": role, "content": content}


def _body(model: str, messages: Sequence[Any], tokens: int) -> bytes:
    asked = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps({**asked, **streamed}).encode()
