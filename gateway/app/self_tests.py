"""Runs a chat model's self-test, partly at load and the rest while the model is idle.

Decode steps of several widths are timed afterwards. The verdict is stored on disk under a digest of
everything that it depends on.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from gateway import clock, logs
from gateway.app.daemon_threads import run_in_daemon_thread
from gateway.app.prefix_files import replacing
from gateway.errors import Unavailable
from gateway.jobs.steps import KvCost, Verdict
from gateway.registry import ChatSpec
from gateway.serving.budget import Budget
from gateway.serving.generation.batcher import GenerationBatcher
from gateway.serving.generation.memory import Layout, RowCosts
from gateway.serving.generation.policy import GenerationLimits
from gateway.serving.generation.widths import next_width
from gateway.serving.lane import Lane
from gateway.serving.ports import GenerationEngine
from gateway.settings import Settings

log = logs.get("self_test")

LANE_S = 2.0  # most seconds on the lane for the steps at load
IDLE_POLL_S = 0.5  # seconds between two steps in idle time
ROWS = 6  # rows in memory at once: three, and their copies when one joins
MAX_FILE_BYTES = 4096  # most bytes to read of a verdict's file, since other programs may write it
_VERDICT = TypeAdapter(Verdict)


@dataclass(frozen=True, slots=True)
class VerdictStore:
    """The stored verdicts, one file each, which only this user can read."""

    folder: Path

    def read(self, digest: str) -> Verdict:
        """Return the verdict stored under a digest; an empty one if there is none."""
        try:
            with self._file(digest).open("rb") as file:
                verdict = _VERDICT.validate_json(file.read(MAX_FILE_BYTES), strict=True)
        except (OSError, ValueError):
            return Verdict()
        is_sound = all(1e-6 < seconds < 1e6 for seconds in verdict.step_s)
        return verdict if is_sound else replace(verdict, step_s=())

    def write(self, digest: str, verdict: Verdict) -> None:
        """Write a verdict to disk if it is whole and lasting. Raises OSError."""
        if not (verdict.is_whole and verdict.is_lasting):
            return
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(self._file(digest), ".verdict-") as file:
            file.write(json.dumps(asdict(verdict)).encode())

    def _file(self, digest: str) -> Path:
        return self.folder / f"{digest}.json"


def verdict_store(settings: Settings) -> VerdictStore:
    if settings.self_test_folder is not None:
        return VerdictStore(settings.self_test_folder)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return VerdictStore(Path(cache) / "mlx-gateway" / "self-tests")


class SelfTest:
    """The self-test of one model, from its load to its close."""

    def __init__(
        self,
        spec: ChatSpec,
        engine: GenerationEngine,
        lane: Lane,
        budget: Budget,
        verdicts: VerdictStore,
        digest: Callable[[], Awaitable[str]],
        limits: GenerationLimits,
        *,
        kv: KvCost,
        is_on: bool,
    ) -> None:
        self._model = spec.id
        self._mode = spec.batching.mode
        self._is_on = is_on and self._mode == "auto"
        self._engine = engine
        self._lane = lane
        self._budget = budget
        self._verdicts = verdicts
        self._compute_digest = digest
        self._digest = ""
        self._limits = limits
        self._kv = kv
        self._steps: Generator[Verdict] | None = None
        self._can_time = engine.facts.is_timed_when_idle  # False after a timed step failed
        self.verdict = Verdict()

    async def begin(self) -> None:
        """Read the verdict from disk or, if it is not there, test for at most LANE_S."""
        if self._mode == "off":
            self.verdict = Verdict(rows=False, problem="models.yaml turns batching off")
        elif not self._is_on:
            return
        else:
            self._digest = await self._compute_digest()
            self.verdict = await run_in_daemon_thread(self._verdicts.read, self._digest)
            spent_s = 0.0
            if not self.verdict.is_whole:
                while not self.verdict.is_whole and spent_s < LANE_S:
                    spent_s += await self._step()
                await self._keep()
        await self._apply()

    async def run_to_end(self) -> Verdict:
        """Run the whole test, even if a verdict is stored, and store the new verdict."""
        self._digest, self._can_time = await self._compute_digest(), True
        while not self._is_over:
            await self._step()
        await self._apply()
        while (rows := self._next_width) is not None:
            await self._time(rows)
        await self._keep()
        return self.verdict

    @contextlib.asynccontextmanager
    async def run_when_idle(self, batcher: GenerationBatcher) -> AsyncIterator[None]:
        """Continue the test whenever the model is idle, until the context ends."""
        batcher.verdict = self.verdict if self._is_on or self._mode == "off" else None
        batcher.note_batching()
        if not self._is_on or (self._is_over and self._next_width is None):
            yield
            return
        task = asyncio.create_task(self._finish(batcher), name=f"self-test {self._model}")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            await self._close()

    @property
    def _is_over(self) -> bool:
        verdict = self.verdict
        knows_images = self._engine.facts.images is None or verdict.images is not None
        is_known = verdict.window is not None and (knows_images or not verdict.rows)
        return verdict.is_whole and is_known

    @property
    def _next_width(self) -> int | None:
        """Return the rows of the next decode step to time; None if no step is left."""
        if not self._engine.is_batched or not self._can_time:
            return None
        limits = self._limits
        return next_width(self.verdict.step_s, limits.max_batch_size, limits.pass_limit_s)

    @property
    def _bytes_needed(self) -> int:
        if not self._is_over:
            return ROWS * self._kv.of(self._engine.facts.self_test_tokens)
        return Layout([1] * (self._next_width or 0)).nbytes(RowCosts(self._kv))

    async def _step(self) -> float:
        async with self._lane.turn("load") as run:
            if self._steps is None:
                self._steps = self._engine.self_test()
            began = clock.now()
            self.verdict = await run(next, self._steps)
            return clock.now() - began

    async def _finish(self, batcher: GenerationBatcher) -> None:
        share = self._budget.share()
        try:
            while not self._is_over or self._next_width is not None:
                await asyncio.sleep(IDLE_POLL_S)
                needed = self._bytes_needed
                is_short = self._budget.spare_bytes < needed
                if batcher.rows or batcher.tickets or not self._lane.is_idle:
                    # Requests need the memory, so free it. The test starts again in idle time.
                    if share.nbytes and (batcher.is_short_of_memory or is_short):
                        await self._close()
                        share.release()
                elif share.nbytes >= needed or not is_short:
                    share.resize(needed)
                    if not self._is_over:
                        await self._step()
                    elif (rows := self._next_width) is not None:
                        await self._time(rows)
                    await self._report(batcher)
                else:
                    share.release()
        except Unavailable:
            pass  # the lane has closed
        except Exception:
            log.error("self_test_failed", model=self._model, exc_info=True)
        finally:
            share.release()

    async def _time(self, rows: int) -> None:
        """Time a decode step of `rows` rows, unless other work takes the device."""
        steps, seconds, began = self._engine.time_step(rows), None, clock.now()
        try:
            while seconds is None:
                async with self._lane.turn("load", f"widths {self._model}") as run:
                    if run.seconds_alone(("tidy",)) < clock.now() - began:
                        return
                    seconds = await run(next, steps)
        except RuntimeError:
            self._can_time = False
            log.error("steps_not_timed", model=self._model, rows=rows, exc_info=True)
            return
        finally:
            async with self._lane.turn("load") as run:
                await run(steps.close)
        self.verdict = replace(self.verdict, step_s=(*self.verdict.step_s, seconds))

    async def _report(self, batcher: GenerationBatcher) -> None:
        before = batcher.verdict
        if not self.verdict.is_whole or self.verdict == before:
            return
        batcher.verdict = self.verdict
        if before is None or replace(before, step_s=self.verdict.step_s) != self.verdict:
            await self._apply()
        batcher.note_batching()
        await self._keep()

    async def _apply(self) -> None:
        async with self._lane.turn("load") as run:
            await run(self._engine.apply_verdict, self.verdict)
        answers = "together" if self._engine.is_batched else "one at a time"
        entry = {"model": self._model, "answers": answers}
        if self.verdict.forbids_batches or self.verdict.prefixes is False:
            log.warning("batching_restricted", **entry, problem=self.verdict.problem)
        elif self.verdict.is_whole:
            log.debug("self_test_passed", **entry)
        else:
            log.debug("self_test_unfinished", **entry, rest="in idle time")

    async def _keep(self) -> None:
        try:
            await run_in_daemon_thread(self._verdicts.write, self._digest, self.verdict)
        except OSError as error:
            log.warning("self_test_not_kept", model=self._model, error=str(error))

    async def _close(self) -> None:
        if self._steps is not None:
            with contextlib.suppress(Unavailable):
                async with self._lane.turn("load") as run:
                    await run(self._steps.close)
            self._steps = None
