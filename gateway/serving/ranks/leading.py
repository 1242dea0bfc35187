"""Rank 0's engine, which sends each call to the other ranks before it makes the call itself.

An engine's decisions depend only on its calls, so every rank takes part in the same passes.
"""

import contextlib
import secrets
from collections.abc import Callable, Generator
from dataclasses import replace
from itertools import chain, islice, repeat
from typing import Final, TypeVar

from gateway.errors import ModelLoadFailed, Unavailable
from gateway.jobs.steps import SequenceParams, StepPlan, StepResult, Verdict
from gateway.serving.ports import GenerationEngine
from gateway.serving.ranks.calls import (
    DropAdapterCall,
    DropCall,
    EngineCall,
    LoadCall,
    ProbeCall,
    SelfTestCall,
    Setup,
    StepCall,
    VerdictCall,
    digest,
    encode,
)
from gateway.serving.ranks.links import Leader

T = TypeVar("T")
WAIT_S: Final = 0.02  # seconds of a load's step, with the lane held, that wait for other ranks


def lead_in_steps(
    leader: Leader,
    model: str,
    setup: Setup,
    steps: Generator[GenerationEngine | None],
) -> Generator[GenerationEngine | None]:
    """Load a model on every rank, in steps. The last step yields rank 0's engine.

    Must run on the lane. Raises ModelLoadFailed if a rank fails.
    """
    sent = leader.send(encode(LoadCall(model, setup)))
    engine: GenerationEngine | None = None
    is_led = False
    try:
        for engine in steps:
            if engine is None:
                yield None
            else:
                break
        replies = leader.replies(sent, WAIT_S)
        while replies is None:
            yield None
            replies = leader.replies(sent, WAIT_S)
        for rank, problem in replies.items():
            if problem:
                raise ModelLoadFailed(model, f"rank {rank}: {problem}")
        assert engine is not None
        is_led = True
        yield LeadingEngine(leader, model, engine)
    finally:
        steps.close()
        if not is_led:
            if engine is not None:
                engine.close()
            with contextlib.suppress(Unavailable):
                leader.send(encode(DropCall(model)))


class LeadingEngine:
    """Rank 0's engine of a model that several ranks share."""

    prefixes = None  # rank 0 has only a part of the prefix cache

    def __init__(self, leader: Leader, model: str, engine: GenerationEngine) -> None:
        self._leader = leader
        self._model = model
        self._engine = engine
        # These methods don't change the engine's state, so the other ranks need not call them.
        self.tokens, self.facts = engine.tokens, engine.facts
        self.prepare, self.compile = engine.prepare, engine.compile
        self.matches_schema, self.read_answer = engine.matches_schema, engine.read_answer
        self.synchronize, self.nbytes = engine.synchronize, engine.nbytes
        self.routing_keys = engine.routing_keys

    def step(self, plan: StepPlan) -> StepResult:
        joining = [(number, _with_seed(params)) for number, params in plan.joining]
        plan = replace(plan, joining=joining)
        sent = [(number, _to_send(params)) for number, params in joining]
        call = StepCall(self._model, replace(plan, joining=sent))
        return self._make(call, lambda: self._engine.step(plan))

    def drop_adapter(self, number: int) -> None:
        call = DropAdapterCall(self._model, number)
        self._make(call, lambda: self._engine.drop_adapter(number))

    def apply_verdict(self, verdict: Verdict) -> None:
        call = VerdictCall(self._model, verdict)
        self._make(call, lambda: self._engine.apply_verdict(verdict))

    def probe(self) -> None:
        self._make(ProbeCall(self._model), self._engine.probe)

    def self_test(self) -> Generator[Verdict]:
        return self._test(self._engine.self_test())

    def time_step(self, rows: int) -> Generator[float | None]:
        return self._test(self._engine.time_step(rows), rows)

    def _test(self, steps: Generator[T], rows: int = 0) -> Generator[T]:
        with contextlib.closing(steps):
            for is_first in chain([True], repeat(False)):
                call = SelfTestCall(self._model, is_first, rows)
                found = self._make(call, lambda: [*islice(steps, 1)])
                if not found:
                    return
                yield found[0]

    def close(self) -> None:
        try:
            with contextlib.suppress(Unavailable):
                self._leader.send(encode(DropCall(self._model)))
        finally:
            self._engine.close()

    def _make(self, call: EngineCall, act: Callable[[], T]) -> T:
        """Make a call on every rank. Raises Unavailable if outcomes differ."""
        sent = self._leader.send(encode(call))
        try:
            result = act()
        except Exception as error:
            self._leader.agree(sent, type(error).__name__)
            raise
        self._leader.agree(sent, digest(result) if isinstance(result, StepResult) else "")
        return result

    @property
    def is_batched(self) -> bool:
        return self._engine.is_batched


def _with_seed(params: SequenceParams) -> SequenceParams:
    # Rank 0 draws the seed, so that all ranks have the same one.
    if params.sampling.seed is not None:
        return params
    return replace(params, sampling=replace(params.sampling, seed=secrets.randbits(64)))


def _to_send(params: SequenceParams) -> SequenceParams:
    # Each rank compiles the grammar itself, and JSON needs the prompt as a list.
    return replace(params, compiled=None, prompt=list(params.prompt))
