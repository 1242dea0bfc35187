"""Embeddings beside chat, and chat beside embeddings: one lane, and nobody starves."""

from gateway.bench.figures import Figures
from gateway.bench.load import Load, Peer, closed_loop
from gateway.bench.targets.rig import MINILM, Rig, rest
from gateway.bench.targets.verdicts import Target, Verdict

STREAMS, TOKENS = 8, 192
EMBEDDERS = 4
P95 = Target(
    f"embedding p95 beside {STREAMS} long chat streams / (its idle p95 + one decode step)",
    at_most=2,
)
CHAT_SHARE = Target(
    f"chat tokens/s beside a closed loop of {EMBEDDERS} embedding clients / alone", 0.4
)


async def beside(rig: Rig) -> list[Verdict]:
    """Each alone, then each beside the other."""
    waits, shares, notes = [], [], []
    wrong = 0
    async with rig.gateway() as peer:
        for _ in range(rig.rounds):
            [idle] = await _loop(rig, peer, _embedders(rig, 1))
            [alone] = await _loop(rig, peer, _streams(rig))
            step_s = STREAMS / max(alone.units_per_s, 1e-9)
            _, waiting = await _loop(rig, peer, _streams(rig), _embedders(rig, 1))
            chat, _ = await _loop(rig, peer, _streams(rig), _embedders(rig, EMBEDDERS))
            wrong += sum(sum(figures.errors.values()) for figures in (idle, alone, waiting, chat))
            waits.append(_p95(waiting) / (_p95(idle) + step_s))
            shares.append(chat.units_per_s / max(alone.units_per_s, 1e-9))
            notes.append(
                f"{_p95(waiting) * 1000:.0f} / ({_p95(idle) * 1000:.0f} + {step_s * 1000:.0f}) ms"
            )
    middle = notes[sorted(range(len(waits)), key=waits.__getitem__)[len(waits) // 2]]
    return [
        P95.judge(waits, errors=wrong, note=middle),
        CHAT_SHARE.judge(shares, errors=wrong),
    ]


def _embedders(rig: Rig, clients: int) -> Load:
    return Load(rig.embeddings(MINILM), clients)


def _streams(rig: Rig) -> Load:
    return Load(rig.chats(max(32, round(rig.seconds(TOKENS)))), STREAMS)


async def _loop(rig: Rig, peer: Peer, *loads: Load) -> list[Figures]:
    measured = await closed_loop(peer, loads, warmup_s=rig.seconds(1), duration_s=rig.seconds(6))
    await rest()
    return measured


def _p95(figures: Figures) -> float:
    """Give the p95; where no request ended at all, it is as long as one likes."""
    return figures.latency.p95 if figures.latency is not None else float("inf")
