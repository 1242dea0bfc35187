"""Validates finished answers against JSON schemas."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from gateway import logs, metrics
from gateway.errors import DeadlineExceeded, SchemaViolated
from gateway.jobs.chat import Delta, GenerateJob
from gateway.serving.admission import until_deadline
from gateway.serving.ports import GenerationEngine
from gateway.serving.tokenize import ThreadPools

log = logs.get("generation")


class Fit(Enum):
    """Whether a finished choice fits its schemas; BROKEN violates one that it must fit."""

    VALID = "valid"
    INVALID = "invalid"
    BROKEN = "broken"
    UNKNOWN = "unknown"

    @property
    def is_valid(self) -> bool | None:
        return None if self is Fit.UNKNOWN else self is Fit.VALID


def choose_retried(job: GenerateJob, fits: Sequence[Fit | None]) -> list[int]:
    """Return the indices of the choices that don't fit and that a retry may change."""
    if job.sampling.seed is not None or job.sampling.temperature == 0:
        return []
    return [index for index, fit in enumerate(fits) if fit in (Fit.INVALID, Fit.BROKEN)]


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    calls: dict[int, tuple[list[str], list[str]]] = field(default_factory=dict)  # name, arguments
    is_cut: bool = False


class AnswerChecker:
    """Checks one job's finished choices against the job's schemas, if it has any."""

    def __init__(
        self,
        name: str,
        engine: GenerationEngine,
        pool: ThreadPools,
        job: GenerateJob,
        unenforced: Sequence[str],
    ) -> None:
        self._name = name
        self._engine = engine
        self._pool = pool
        self._job = job
        self._choices: dict[int, _Choice] = {}
        # JSON pointers to parts of schemas that no grammar enforces.
        self.unenforced = unenforced
        functions = () if job.calling is None else job.calling.functions
        self._held = {
            function.name: function
            for function in functions
            if function.strict or (job.calling and job.calling.forced)
        }
        has_schema = job.grammar is not None and job.grammar.kind == "json_schema"
        self._must_fit = job.grammar is not None and (job.grammar.strict or job.grammar.must_fit)
        self._is_needed = has_schema or bool(self._held)

    def add(self, delta: Delta) -> None:
        if not self._is_needed:
            return
        choice = self._choices.setdefault(delta.index, _Choice())
        choice.text.append(delta.text)
        choice.is_cut = delta.finish_reason == "length" or delta.stop is not None
        if delta.call is not None:
            name, arguments = choice.calls.setdefault(delta.call.index, ([], []))
            name.append(delta.call.name or "")
            arguments.append(delta.call.arguments)

    async def check(self, index: int) -> Fit | None:
        """Return whether a finished choice fits its schemas, or None without schemas."""
        choice = self._choices.pop(index, None)
        if choice is None:
            return None
        schemas: list[tuple[str, str, bool]] = []
        if not choice.is_cut:  # the caller's limits cut the answer, so it needn't fit
            schemas += self._schemas(choice)
        if not schemas and not self.unenforced:
            return None
        fit = await self._fit(schemas)
        if fit.is_valid is False:
            log.info("schema_violated", model=self._name, unenforced=list(self.unenforced[:16]))
        outcome = {True: "valid", False: "invalid", None: "unknown"}[fit.is_valid]
        metrics.of(metrics.CHECKED_ANSWERS, self._name, outcome).inc()
        return fit

    async def require_fits(self) -> None:
        """Check the remaining choices. Raises SchemaViolated if one is BROKEN."""
        for index in list(self._choices):
            if await self.check(index) is Fit.BROKEN:
                raise SchemaViolated

    async def _fit(self, schemas: Sequence[tuple[str, str, bool]]) -> Fit:
        results: list[tuple[bool | None, bool]] = []
        try:
            async with until_deadline(self._job.caller):
                for schema, answer, must_fit in schemas:
                    check = self._engine.matches_schema
                    is_valid = await self._pool.run(check, schema, answer, kind="checks")
                    results.append((is_valid, must_fit))
        except DeadlineExceeded:
            results.append((None, False))
        if (False, True) in results:
            return Fit.BROKEN
        if (False, False) in results:
            return Fit.INVALID
        is_known = results and all(is_valid for is_valid, _ in results)
        return Fit.VALID if is_known else Fit.UNKNOWN

    def _schemas(self, choice: _Choice) -> Iterator[tuple[str, str, bool]]:
        """Yield each schema, the text to validate, and whether the text must fit."""
        grammar = self._job.grammar
        for name, arguments in choice.calls.values():
            function = self._held.get("".join(name))
            if function is not None:
                schema = json.dumps(dict(function.parameters))
                yield schema, "".join(arguments), function.strict
        if grammar is not None and grammar.kind == "json_schema" and not choice.calls:
            yield grammar.source, "".join(choice.text), self._must_fit
