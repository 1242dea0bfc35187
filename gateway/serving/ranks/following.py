"""The loop of a rank above 0, which makes each call that rank 0 sends."""

from collections import OrderedDict
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Final, Protocol

from gateway import logs
from gateway.errors import GatewayError
from gateway.jobs.chat import Compiled, Grammar
from gateway.jobs.steps import SequenceParams, StepPlan
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
    decode,
    digest,
)

log = logs.get("ranks")

IDLE_S: Final = 10.0  # seconds without a call after which `tidy` is called
GRAMMARS: Final = 64


class Link(Protocol):
    """The connection to rank 0."""

    def next_frame(self, wait_s: float) -> bytes | None:
        """Return the next frame, or None after `wait_s`; an empty frame ends the group."""

    def reply(self, outcome: str) -> None: ...


LoadModel = Callable[[str, Setup], GenerationEngine]


def follow(link: Link, load: LoadModel, tidy: Callable[[], None]) -> None:
    """Make rank 0's calls on the MLX thread, until rank 0 ends the group."""
    models: dict[str, FollowingEngine] = {}
    while True:
        frame = link.next_frame(IDLE_S)
        if frame is None:
            tidy()
            continue
        if not frame:
            return
        match decode(frame):
            case LoadCall() as call:
                link.reply(_load(call, load, models))
            case DropCall(model):
                if model in models:
                    models.pop(model).close()
            case call:
                link.reply(models[call.model].make(call))


def _load(call: LoadCall, load: LoadModel, models: "dict[str, FollowingEngine]") -> str:
    try:
        models[call.model] = FollowingEngine(load(call.model, call.setup))
    except GatewayError as error:
        log.error("model_load_failed", model=call.model, error=error.message)
        return error.message
    except Exception as error:
        log.exception("model_load_failed", model=call.model)
        return f"{type(error).__name__}: {error}"
    log.info("model_loaded", model=call.model)
    return ""


class FollowingEngine:
    """This rank's engine of one model, which repeats the calls of rank 0's engine."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._test: Generator[object] | None = None
        self._grammars: OrderedDict[Grammar, Compiled] = OrderedDict()

    def make(self, call: EngineCall) -> str:
        """Make a call, and return the reply."""
        try:
            return self._make(call) or ""
        except Exception as error:
            log.warning("call_failed", model=call.model, call=call.method, exc_info=True)
            return type(error).__name__

    def _make(self, call: EngineCall) -> str | None:
        engine = self._engine
        match call:
            case StepCall(model, plan):
                return self._step(model, plan)
            case SelfTestCall(is_first=is_first, rows=rows):
                if is_first or self._test is None:
                    self._end_test()
                    self._test = engine.time_step(rows) if rows else engine.self_test()
                if next(self._test, None) is not None and rows:
                    self._end_test()  # timing is complete, so the test's KV is freed
            case VerdictCall(verdict=verdict):
                engine.apply_verdict(verdict)
            case DropAdapterCall(number=number):
                engine.drop_adapter(number)
            case ProbeCall():
                engine.probe()
        return None

    def close(self) -> None:
        self._end_test()
        self._engine.close()

    def _step(self, model: str, plan: StepPlan) -> str:
        joining = [(number, self._with_grammar(params)) for number, params in plan.joining]
        result = self._engine.step(replace(plan, joining=joining))
        for fault in result.faults:
            log.error("pass_failed", model=model, error=fault.message)
        return digest(result)

    def _with_grammar(self, params: SequenceParams) -> SequenceParams:
        grammar = params.grammar
        if grammar is None:
            return params
        compiled = self._grammars.get(grammar)
        if compiled is None:
            compiled = self._grammars[grammar] = self._engine.compile(grammar)
            if len(self._grammars) > GRAMMARS:
                self._grammars.popitem(last=False)
        return replace(params, compiled=compiled)

    def _end_test(self) -> None:
        if self._test is not None:
            self._test.close()
            self._test = None
