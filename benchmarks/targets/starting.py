"""The times from the start of a process to its first answer and to its first chat."""

import time
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from statistics import median

import yaml

from benchmarks import servers
from benchmarks.targets.chatting import MLX_LM_NAME
from benchmarks.targets.rig import CHAT, MODELS, Rig, errors, rest
from benchmarks.targets.verdicts import Target, Verdict, ratio
from benchmarks.workloads import Wording, burst
from gateway.bench.load import Peer
from gateway.bench.requests import Kind

TOKENS = 8
LISTENING = Target("seconds from start to the first answer of /health", at_most=1.5)
BESIDE = Target("seconds to the first answer of /health / mlx-lm's own server", at_most=1)
CHATTED = Target("start to the end of a first chat answer / mlx-lm's own server", at_most=1)


async def start(rig: Rig) -> list[Verdict]:
    """One chat model, preloaded; both servers in turn, each a new process in each round."""
    models = rig.folder / "start.yaml"
    entry = {CHAT: {**MODELS[CHAT], "preload": True}}
    models.write_text(yaml.safe_dump({"version": 1, "models": entry}), encoding="utf-8")
    wrong = 0
    own, other = [], []
    for _ in range(rig.rounds):
        wording = rig.wording(CHAT, max_tokens=TOKENS)
        *times, mistaken = await _started(servers.gateway(models, ready_at="/health"), wording)
        own.append(times)
        wrong += mistaken
        await rest()
        named = replace(wording, model=MLX_LM_NAME)
        *times, _ = await _started(servers.mlx_lm(rig.folder / CHAT), named)
        other.append(times)
        await rest()
    pairs = list(zip(own, other, strict=True))
    first, last = (
        f"{median([each[n] for each in own]):.2f} / {median([each[n] for each in other]):.2f} s"
        for n in (0, 1)
    )
    return [
        LISTENING.judge([listening for listening, _ in own], errors=wrong),
        BESIDE.judge([ratio(a[0], b[0]) for a, b in pairs], errors=wrong, note=first),
        CHATTED.judge([ratio(a[1], b[1]) for a, b in pairs], errors=wrong, note=last),
    ]


async def _started(
    server: AbstractAsyncContextManager[str], wording: Wording
) -> tuple[float, float, int]:
    """Return the seconds to the first answer and to that of a chat, and the errors."""
    began = time.monotonic()
    async with server as url, Peer(url) as peer:
        listening = time.monotonic() - began
        answers = await burst(peer, wording.workload(Kind.CHAT), 1)
        return listening, time.monotonic() - began, errors(answers)
