"""Continuous batching of one chat model: sequences join, step and leave a shared batch."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import TypeAlias

from gateway import clock, logs, metrics
from gateway.clock import Stage
from gateway.errors import ContextLengthExceeded, GatewayError, NoRoom, PassFault, Unavailable
from gateway.jobs.chat import Adapter, Compiled, Delta, GenerateJob, Usage
from gateway.jobs.steps import Drafter, Pass, SequenceParams, StepPlan, StepResult, Verdict
from gateway.serving.admission import until_deadline
from gateway.serving.budget import Budget
from gateway.serving.faults import run_forever
from gateway.serving.generation.answer_checks import AnswerChecker
from gateway.serving.generation.choice import Choice, DeltaReader, batch_shape
from gateway.serving.generation.draft_gains import DraftGains
from gateway.serving.generation.grammars import GrammarCache
from gateway.serving.generation.memory import RowCosts, RowMemory, longest_chunk
from gateway.serving.generation.policy import GenerationLimits, prefill_goes_first
from gateway.serving.generation.queue import JobQueue, rank
from gateway.serving.generation.scheduler import PrefillPace, Scheduler
from gateway.serving.lane import Lane, Turn
from gateway.serving.ports import GenerationEngine
from gateway.serving.tokenize import ThreadPools, prompt_kind

log = logs.get("generation")

# Decoding waits for prompts of at most this many prefill passes, and no longer than these take.
PREFILL_FIRST_PASSES = 2
RETRY_PAUSE_S = 0.1


@dataclass(slots=True)
class Generation:
    """A running job: its usage, its parameters, and an iterator over its deltas."""

    usage: Usage
    deltas: AsyncGenerator[Delta, None]
    params: SequenceParams
    checker: AnswerChecker


class GenerationBatcher:
    """The sequences of one model, and the workers that run them while `running` is entered."""

    def __init__(
        self,
        name: str,
        engine: GenerationEngine,
        lane: Lane,
        pool: ThreadPools,
        limits: GenerationLimits,
        grammars: GrammarCache[Compiled],
        memory: RowMemory | None = None,
    ) -> None:
        self._name = name
        self._log = log.bind(model=name)
        self.engine = engine
        self._lane = lane
        self._pool = pool
        self._limits = limits
        self._grammars = grammars
        self._queue = JobQueue(
            name, max_tokens=limits.queue_max_tokens, max_choices=limits.queue_limit
        )
        self.memory = memory or RowMemory(Budget(0), RowCosts())
        self._scheduler = Scheduler(name, self._cap_batch(limits), self.memory)
        self._wake_events = {kind: asyncio.Event() for kind in ("prefill", "decode")}
        self._decode_waits_since: float | None = None
        self._warnings: set[str] = set()
        self._interrupt = threading.Event()  # set to end the current turn after its pass
        self._pace = PrefillPace(limits)
        self._gains = DraftGains()
        self._state = StepResult()
        self.verdict: Verdict | None = None
        self._was_batched = self.is_batched

    @property
    def rows(self) -> int:
        return self._scheduler.running

    @property
    def tickets(self) -> int:
        """Return the number of sequences that wait to join or to decode."""
        return self._scheduler.waiting + self._scheduler.parked

    @property
    def routing_keys(self) -> Sequence[bytes]:
        return self.engine.routing_keys()

    @property
    def is_short_of_memory(self) -> bool:
        return self._scheduler.is_short_of_memory

    @property
    def is_batched(self) -> bool:
        """Return True while sequences run together, False once they run one at a time."""
        return self.engine.is_batched

    def _cap_batch(self, limits: GenerationLimits) -> GenerationLimits:
        return limits if self.is_batched else replace(limits, max_batch_size=1)

    def note_batching(self) -> None:
        """Adopt the self-test's step times, and whether the engine batches sequences."""
        self._scheduler.step_s = () if self.verdict is None else self.verdict.step_s
        if self._was_batched == self.is_batched:
            return
        self._was_batched = self.is_batched
        if not self._was_batched:
            log.warning("batching_ended", model=self._name)
        self.adopt(self._limits)

    def _on_fault(self, fault: PassFault) -> None:
        """Log a pass's error, and run fewer sequences at once after a lack of memory."""
        metrics.of(metrics.BATCH_FAULTS, self._name).inc()
        log.warning("batch_fault", model=self._name, fault=fault.fault.value, error=fault.message)
        if fault.is_pressure:
            self._scheduler.shed()
        self.note_batching()

    def adopt(self, limits: GenerationLimits) -> None:
        self._limits = limits
        self._scheduler.limits = self._cap_batch(limits)
        self._queue.adopt(max_tokens=limits.queue_max_tokens, max_choices=limits.queue_limit)
        self._pace.adopt(limits)
        self.memory.adopt(longest_chunk(limits.prefill_chunk_tokens))
        self._wake()

    @contextlib.asynccontextmanager
    async def generate(
        self, job: GenerateJob, on_full: Callable[[], None] | None = None
    ) -> AsyncIterator[Generation]:
        """Queue a job, and yield its Generation. Exiting drops every sequence of the job.

        If the queue is full, `on_full` is called and the job waits, or without it Overloaded is
        raised. Also raises BadRequest, ContextLengthExceeded and PromptTooLarge. Iterating raises
        DeadlineExceeded and EngineFailed.
        """
        timings, name = job.caller.timings, self._name_for(job)
        timings.model = name
        sequences = await self._plan(job)
        async with self._queue.place(job.caller, sequences, on_full):
            # Scoring labels may take thousands of sequences, and each check takes 0.1 ms.
            self.memory.check(self._name, max(sequences, key=lambda each: len(each.prompt)))
            sequences = await self._compile(job, sequences)
            inbox: asyncio.Queue[Delta | GatewayError] = asyncio.Queue()
            job_rank = rank(clock.now(), job.caller.tier, self._limits.tier_head_start_s)
            request = str(job.caller.number)
            choices = [Choice(each, inbox, job_rank, None, request) for each in sequences]
            choices[0].timings, timings.stage = timings, Stage.QUEUE
            self._wait(choices)
            counted = [choice.params for choice in choices if choice.counts_prompt]
            images = [image.tokens for each in counted for image in each.images]
            usage = Usage(sum(len(each.prompt) for each in counted), image_tokens=sum(images))
            metrics.count_images(name, images)
            timings.tokens_in = usage.prompt_tokens
            metrics.count_prompt(name, usage.prompt_tokens)
            compiled = sequences[0].compiled
            unenforced = () if compiled is None else compiled.unenforced
            checker = AnswerChecker(name, self.engine, self._pool, job, unenforced)
            reader = DeltaReader(self.engine, self._pool, job, sequences, inbox, self._warn_once)
            deltas = self._deltas(job, reader, len(choices), checker)
            if sequences[0].calls_are_text:
                self._warn_once("tool_format_unknown", hint="set `tool_parser:`")
            deadline = reader.end_at_deadline()
            try:
                yield Generation(usage, deltas, sequences[0], checker)
            finally:
                deadline.cancel()
                stages = (choice.stage for choice in choices if not choice.is_over)
                timings.stage = next(stages, None)
                self._drop(choices)

    async def count_tokens(self, job: GenerateJob) -> int:
        """Return the number of a job's prompt tokens, even beyond the model's context.

        Raises BadRequest for a prompt that cannot be rendered.
        """
        job.caller.timings.model = self._name_for(job)
        try:
            return len((await self._plan(job))[0].prompt)
        except ContextLengthExceeded as error:
            return error.tokens

    async def _plan(self, job: GenerateJob) -> Sequence[SequenceParams]:
        started, timings = clock.now(), job.caller.timings
        timings.stage = Stage.IMAGES if job.images else Stage.TOKENIZE
        async with until_deadline(job.caller):
            sequences = await self._pool.run(self.engine.prepare, job, kind=prompt_kind(job))
        timings.add(timings.stage, started)
        return sequences

    def _name_for(self, job: GenerateJob) -> str:
        return job.adapter.model if job.adapter is not None else self._name

    def _warn_once(self, event: str, **details: str | int) -> None:
        if event not in self._warnings:
            self._warnings.add(event)
            log.warning(event, model=self._name, **details)

    async def _compile(
        self, job: GenerateJob, sequences: Sequence[SequenceParams]
    ) -> Sequence[SequenceParams]:
        grammar = sequences[0].grammar
        if grammar is None:
            return sequences
        started, job.caller.timings.stage = clock.now(), Stage.COMPILE
        async with until_deadline(job.caller):
            compiled = await self._grammars.get(grammar)
        job.caller.timings.add(Stage.COMPILE, started)
        return [replace(each, compiled=compiled) for each in sequences]

    async def _deltas(
        self, job: GenerateJob, reader: DeltaReader, choices: int, checker: AnswerChecker
    ) -> AsyncGenerator[Delta, None]:
        name, timings = self._name_for(job), job.caller.timings
        tokens_out = metrics.of(metrics.TOKENS_OUT, name)
        while choices:
            for delta in await reader.next():
                if delta.finish_reason is not None:
                    choices -= 1
                tokens_out.inc(delta.tokens)
                timings.tokens_out += delta.tokens
                if delta.finish_reason is not None and delta.judgement is None:
                    timings.finish_reasons.append(delta.finish_reason)
                if delta.cached_tokens:
                    timings.cached_tokens += delta.cached_tokens
                    metrics.of(metrics.CACHED_TOKENS, name).inc(delta.cached_tokens)
                if delta.unkept_tokens:
                    metrics.of(metrics.UNKEPT_TOKENS, name).inc(delta.unkept_tokens)
                    hint = "see GATEWAY_PREFIX_CACHE_BYTES"
                    self._warn_once("prompt_not_kept", tokens=delta.unkept_tokens, hint=hint)
                checker.add(delta)
                yield delta

    def _wait(self, choices: Iterable[Choice]) -> None:
        self._scheduler.wait(choices)
        self._wake_events["prefill"].set()

    def _drop(self, choices: Sequence[Choice]) -> None:
        if self._scheduler.drop(choices):
            self._interrupt.set()
            self._wake()

    def _on_memory_change(self) -> None:
        if self.tickets or self.memory.must_shrink_prefixes:
            self._wake()

    def _wake(self) -> None:
        for event in self._wake_events.values():
            event.set()

    async def _prefill(self) -> None:
        scheduler = self._scheduler
        while True:
            try:
                async with asyncio.timeout_at(scheduler.look_for_memory()):
                    await self._wake_events["prefill"].wait()
            except TimeoutError:
                scheduler.end_stuck(NoRoom(self._name, ()))
                self._wake_events["decode"].set()  # a decode turn ends sequences that have tokens
            self._wake_events["prefill"].clear()
            while self._state.reading or scheduler.may_join:
                if not await self._turn("prefill"):
                    break
            scheduler.look_for_memory()
            if scheduler.is_short_of_memory:
                scheduler.make_room()

    async def _decode(self) -> None:
        while True:
            await self._wake_events["decode"].wait()
            self._wake_events["decode"].clear()
            while self._state.decoding or self._scheduler.must_move:
                if self._prefill_goes_first():
                    break
                if not await self._turn("decode"):
                    break
                self._decode_waits_since = None

    def _prefill_goes_first(self) -> bool:
        """Return True if decoding should wait for prefill."""
        scheduler, now = self._scheduler, clock.now()
        if scheduler.must_move or not self._state.reading:
            return False
        self._decode_waits_since = self._decode_waits_since or now
        waited_s = now - self._decode_waits_since
        bound_s = PREFILL_FIRST_PASSES * self._limits.pass_limit_s
        soon = scheduler.count_soon_decoding(PREFILL_FIRST_PASSES * self._pace.tokens)
        return prefill_goes_first(soon, scheduler.decoding, waited_s, bound_s)

    async def _turn(self, kind: str) -> bool:
        scheduler = self._scheduler
        try:
            async with self._lane.turn(kind, self._name) as turn:
                self._lane.health.check()
                self._interrupt.clear()
                plan = scheduler.schedule(turn, may_join=kind == "prefill")
                self._pace.begin(turn, scheduler.prompts_in_prefill)
                turn.set_shape((self._name, kind, *batch_shape(scheduler.batch.choices)))
                await turn(self._run, plan, turn, asyncio.get_running_loop())
        except Unavailable as error:
            scheduler.end_all(error)
            return False
        except Exception as error:
            log.error("batch_failed", model=self._name, exc_info=True)
            scheduler.end_running(self._lane.health.as_error(self._name, error))
            await asyncio.sleep(RETRY_PAUSE_S)
        self.note_batching()
        scheduler.hold()
        self._wake()
        return True

    def _run(self, plan: StepPlan, turn: Turn, loop: asyncio.AbstractEventLoop) -> None:
        """Run the passes of a turn, on the lane."""
        result, decoded = self._state, 0
        while True:
            started = clock.now()
            if plan.kind == "prefill":
                budget = self._pace.choose(is_decoding=result.decoding > 0)
                plan = replace(plan, token_budget=budget, encoding_s=self._limits.pass_limit_s)
            else:
                plan = replace(plan, drafters=self._gains.choose(result.decoding))
            result = self.engine.step(plan)
            seconds = clock.now() - started
            turn.beat()
            # The loop processes a pass's results while the next pass runs.
            loop.call_soon_threadsafe(self._process, plan.kind, result, seconds)
            self._heed(result.faults)
            if plan.kind == "prefill":
                if not result.size.is_encoding:
                    self._pace.note(result.size.padded_tokens, seconds)
                has_more = bool(result.reading) and turn.is_contended
            else:
                # The first step's pass may have been launched before this turn, so its time would
                # be too short.
                is_whole = decoded > 0 or not turn.is_contended
                judged = self._gains.note(result, seconds) if is_whole else None
                if judged is not None:
                    loop.call_soon_threadsafe(self._tell_gain, *judged)
                decoded += max(1, result.size.padded_tokens // max(1, result.size.rows))
                has_more = result.decoding > 0 and decoded < self._scheduler.most_steps
            if not has_more or self._interrupt.is_set() or turn.is_up:
                break
            plan = StepPlan(kind=plan.kind)
        # Launched work must not run on into another turn.
        if turn.is_contended:
            self.engine.synchronize()
        else:
            turn.leave_under_way(self.engine.synchronize)

    def _heed(self, faults: Sequence[PassFault]) -> None:
        """Free memory if it ran out. Raises DeviceLost."""
        health = self._lane.health
        for fault in faults:
            if fault.is_pressure:
                self._interrupt.set()  # sequences must be preempted before the next pass
                self.engine.synchronize()  # else `shed` would raise the step's late errors
                health.shed()
            health.note(fault.fault, fault.message, self.engine.probe)

    def _process(self, kind: str | None, result: StepResult, seconds: float) -> None:
        for fault in result.faults:
            self._on_fault(fault)
        self._state = result
        self.memory.note_prefixes(result.prefix_bytes)
        self._scheduler.note_reading(result.reading)
        if result.size.rows:
            self._observe(kind, result.size, seconds)
        for delta in result.deltas:
            choice = self._scheduler.get(delta.id)
            if choice is not None:
                if delta.finish_reason is not None or delta.error is not None:
                    self._scheduler.note_end(delta.id)
                    self._wake_events["prefill"].set()
                choice.deliver(delta, self._name)

    def _observe(self, kind: str | None, size: Pass, seconds: float) -> None:
        metrics.count_features(self._name, size.encoded, size.recalled)
        if kind == "decode":
            metrics.of(metrics.BATCH_ROWS, self._name).observe(size.rows)
            for ahead in ("forced", "drafted", "accepted"):
                if tokens := getattr(size, ahead):
                    metrics.of(metrics.READ_AHEAD, self._name, ahead).inc(tokens)
        elif size.is_encoding:
            metrics.of(metrics.TOWER_SECONDS, self._name).observe(seconds)
        elif size.padded_tokens:
            padding = 1 - size.tokens / size.padded_tokens
            metrics.of(metrics.BATCH_PADDING, self._name).observe(padding)
        self._log.debug(
            "batch",
            kind=kind,
            rows=size.rows,
            padded_tokens=size.padded_tokens,
            ms=round(1000 * seconds, 2),
        )

    def _tell_gain(self, drafter: Drafter, gain: float) -> None:
        metrics.of(metrics.DRAFT_GAIN, self._name, drafter).set(gain)
        if gain < 1:
            log.info("drafts_pause", model=self._name, drafter=drafter, gain=round(gain, 2))

    def end(self, error: GatewayError) -> None:
        self._scheduler.end_all(error)
        self._wake()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["GenerationBatcher"]:
        """Run the workers while entered; remaining sequences then fail with Unavailable."""

        def end(error: Exception) -> None:
            self.end(self._lane.health.as_error(self._name, error))

        # Prefill and decode take turns of the lane, so that neither keeps the other from it.
        workers = [
            asyncio.create_task(run_forever(f"{kind} {self._name}", work, end))
            for kind, work in (("prefill", self._prefill), ("decode", self._decode))
        ]
        with self.memory.prefixes.in_use():
            try:
                with self.memory.watch(self._on_memory_change):
                    yield self
            finally:
                self._interrupt.set()
                for worker in workers:
                    worker.cancel()
                await asyncio.wait(workers)
                gone = f"The model `{self._name}` was unloaded meanwhile."
                self._scheduler.end_all(Unavailable(gone, retry_after_s=1))
                self.memory.release()


class AdaptedBatcher:
    """Runs jobs with one adapter of a base model, on the base's workers."""

    def __init__(self, base: GenerationBatcher, adapter: Adapter) -> None:
        self._base = base
        self._adapter = adapter

    @property
    def tickets(self) -> int:
        """Return 0, since the base's batcher counts the adapter's sequences."""
        return 0

    @property
    def is_batched(self) -> bool:
        return self._base.is_batched

    @property
    def verdict(self) -> Verdict | None:
        return self._base.verdict

    @property
    def routing_keys(self) -> Sequence[bytes]:
        return self._base.engine.routing_keys(self._adapter.number)

    def generate(
        self, job: GenerateJob, on_full: Callable[[], None] | None = None
    ) -> AbstractAsyncContextManager[Generation]:
        return self._base.generate(self._adapt(job), on_full)

    async def count_tokens(self, job: GenerateJob) -> int:
        return await self._base.count_tokens(self._adapt(job))

    def end(self, error: GatewayError) -> None:
        """Do nothing, since the adapter's sequences end with the base's."""

    def _adapt(self, job: GenerateJob) -> GenerateJob:
        return replace(job, adapter=self._adapter)


ChatBatcher: TypeAlias = GenerationBatcher | AdaptedBatcher
