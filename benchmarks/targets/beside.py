"""Embeddings beside chat, and chat beside embeddings: one lane, and nobody starves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.targets.rig import MINILM, Rig, rest
from benchmarks.targets.verdicts import Target, Verdict, ratio
from gateway.bench.figures import Figures
from gateway.bench.load import Load, Peer, run_closed_loop

STREAMS, TOKENS = 8, 192
EMBEDDERS = 4
P95 = Target(
    f"embedding p95 beside {STREAMS} long chat streams / (its idle p95 + one decode step)",
    at_most=2,
)
CHAT_SHARE = Target(
    f"chat tokens/s beside a closed loop of {EMBEDDERS} embedding clients / alone", 0.4
)


@dataclass(frozen=True, slots=True)
class Round:
    """The figures of one round.

    Alone: embeddings `idle`, chat `alone`. Beside each other: `waiting` embeddings with the `busy`
    streams; `chat` with the embeddings that were `asking`.
    """

    idle: Figures
    alone: Figures
    busy: Figures
    waiting: Figures
    chat: Figures
    asking: Figures

    @property
    def wrong(self) -> int:
        """Every wrong answer, of the load beside too: it would leave more to the other."""
        every = (self.idle, self.alone, self.busy, self.waiting, self.chat, self.asking)
        return sum(sum(figures.errors.values()) for figures in every)

    @property
    def wait(self) -> float | None:
        """Compare the p95 beside chat with its bound; None unless there was chat."""
        if self.idle.latency is None or not (self.busy.units_per_s and self.alone.units_per_s):
            return None
        return _p95(self.waiting) / (_p95(self.idle) + self._step_s)

    @property
    def share(self) -> float | None:
        """Compare chat beside embeddings with chat alone; None unless there were embeddings."""
        if not self.asking.units_per_s:
            return None
        return ratio(self.chat.units_per_s, self.alone.units_per_s)

    @property
    def _step_s(self) -> float:
        return STREAMS / self.alone.units_per_s

    def __str__(self) -> str:
        idle, step = _p95(self.idle) * 1000, self._step_s * 1000
        return f"{_p95(self.waiting) * 1000:.0f} / ({idle:.0f} + {step:.0f}) ms"


async def beside(rig: Rig) -> list[Verdict]:
    """Each alone, then each beside the other."""
    rounds = []
    async with rig.gateway() as peer:
        for _ in range(rig.rounds):
            [idle] = await _loop(rig, peer, _embedders(rig, 1))
            [alone] = await _loop(rig, peer, _streams(rig))
            busy, waiting = await _loop(rig, peer, _streams(rig), _embedders(rig, 1))
            chat, asking = await _loop(rig, peer, _streams(rig), _embedders(rig, EMBEDDERS))
            rounds.append(Round(idle, alone, busy, waiting, chat, asking))
    return judged(rounds)


def judged(rounds: Sequence[Round]) -> list[Verdict]:
    """Judge both targets; the middle round says its milliseconds."""
    wrong = sum(each.wrong for each in rounds)
    told = sorted((each.wait, str(each)) for each in rounds if each.wait is not None)
    return [
        P95.judge(
            [each.wait for each in rounds],
            errors=wrong,
            note=told[len(told) // 2][1] if told else "",
        ),
        CHAT_SHARE.judge([each.share for each in rounds], errors=wrong),
    ]


def _embedders(rig: Rig, clients: int) -> Load:
    return Load(rig.embeddings(MINILM), clients)


def _streams(rig: Rig) -> Load:
    return Load(rig.chats(max(32, round(rig.seconds(TOKENS)))), STREAMS)


async def _loop(rig: Rig, peer: Peer, *loads: Load) -> list[Figures]:
    measured = await run_closed_loop(
        peer, loads, warmup_s=rig.seconds(1), duration_s=rig.seconds(6)
    )
    await rest()
    return measured


def _p95(figures: Figures) -> float:
    """Give the p95; where no request ended at all, it is as long as one likes."""
    return figures.latency.p95 if figures.latency is not None else math.inf
