"""A batcher in virtual time, on a device whose steps take as long as a real device's."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from gateway import clock
from gateway.jobs.chat import Delta
from gateway.jobs.steps import SequenceParams
from gateway.serving.generation.batcher import GenerationBatcher
from gateway.serving.generation.grammars import GrammarCache
from gateway.serving.generation.memory import RowMemory
from gateway.serving.generation.policy import GenerationLimits
from gateway.serving.generation.widths import WIDTHS, StepTimes
from gateway.serving.lane import Lane
from tests.fakes import PASSED, ScriptedChat
from tests.virtual_time import VirtualLoop

# Seconds of a step of 1, 2, 4, 8 and 16 rows. By three reports of Macs two rows give
# 0.41 to 0.62 × the tokens of one after the other, four 0.77 to 1.15, eight 1.6 to 2.1.
M1 = (0.030, 0.109, 0.125, 0.130, 0.137)
# A width between: two rows pay, and four do not.
PAIRS = (0.030, 0.033, 0.120, 0.400, 0.900)
WIDE = (0.030, 0.031, 0.033, 0.036, 0.040)  # the more the better


def seconds(step_s: StepTimes, rows: int) -> float:
    """Return the seconds of a step: beyond the widest that is known, each row costs as much."""
    widest = WIDTHS[len(step_s) - 1]
    return float(np.interp(rows, WIDTHS[: len(step_s)], step_s)) * max(1.0, rows / widest)


@dataclass
class SimulatedChat(ScriptedChat):
    """A scripted chat whose steps take virtual time, and that knows who was in which."""

    device: StepTimes = M1
    together: list[frozenset[int]] = field(default_factory=list)  # the sequences of each step
    came: dict[int, int] = field(default_factory=dict)  # the steps before each joined
    spent_s: float = 0.0  # the time of all steps

    def join(self, number: int, params: SequenceParams) -> None:
        self.came[number] = len(self.together)
        super().join(number, params)

    def decode(self) -> list[Delta]:
        self.together.append(frozenset(self.inside("decoding")))
        seconds_s = seconds(self.device, len(self.together[-1]))
        self.spent_s += seconds_s
        loop: Any = asyncio.get_running_loop()
        loop._now += seconds_s
        return super().decode()

    def waits(self) -> dict[int, int]:
        """Return the longest wait of each sequence for a step of its own, in steps of others."""
        longest: dict[int, int] = {}
        last = {number: step - 1 for number, step in self.came.items()}
        for step, ids in enumerate(self.together):
            for each in ids:
                longest[each] = max(longest.get(each, 0), step - last[each] - 1)
                last[each] = step
        return longest


class VirtualLane(Lane):
    """A lane whose calls are made on the loop's thread, which the engine's time passes on."""

    async def _run(self, beat: Any, function: Callable[..., Any], *args: Any) -> Any:
        result = function(*args)
        await asyncio.sleep(0)  # what the call has told the loop is known when it returns
        return result

    async def __aenter__(self) -> "VirtualLane":
        self._is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_open = False


class VirtualPools:
    """Threads that take no time."""

    async def run(self, function: Callable[..., Any], *args: Any, kind: str = "") -> Any:
        return function(*args)


@asynccontextmanager
async def simulating(
    engine: SimulatedChat,
    memory: RowMemory | None = None,
    *,
    known: StepTimes | None = None,
    **given: Any,
) -> AsyncIterator[GenerationBatcher]:
    """Batch on a device whose steps were measured, or are known as `known` says."""
    limits = GenerationLimits(**{"max_batch_size": 32, "prefill_chunk_tokens": 512, **given})
    pools: Any = VirtualPools()
    grammars = GrammarCache("m", engine.compile, pools.run)
    async with VirtualLane() as lane:
        batcher = GenerationBatcher("m", engine, lane, pools, limits, grammars, memory)
        batcher.verdict = replace(PASSED, step_s=engine.device if known is None else known)
        batcher.note_batching()
        async with batcher.running():
            yield batcher


def run_virtually(work: Coroutine[Any, Any, None]) -> None:
    """Run in a loop of its own, whose time everybody reads."""
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        patch.setattr(clock, "now", runner.get_loop().time)
        runner.run(work)
