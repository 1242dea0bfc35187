"""Checks finished answers by the parts of a schema that their grammar does not enforce."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway import logs, metrics
from gateway.errors import DeadlineExceeded
from gateway.jobs import Delta, GenerateJob
from gateway.serving.admission import until_deadline
from gateway.serving.ports import GenerationEngine
from gateway.serving.tokenize import ThreadPools

log = logs.get("generation")


@dataclass(slots=True)
class _Choice:
    """A choice so far: its text, the name and arguments of each call, and if it was cut."""

    text: list[str] = field(default_factory=list)
    calls: dict[int, tuple[list[str], list[str]]] = field(default_factory=dict)
    is_cut: bool = False


class AnswerChecker:
    """Collects the choices of one job, and checks them by its schemas if any is enforced in part.

    `unenforced` are JSON pointers to the parts that are not enforced, after the function's name
    for parameters of one.
    """

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
        self.unenforced = unenforced

    def add(self, delta: Delta) -> None:
        """Add a delta to its choice."""
        if not self.unenforced:
            return
        choice = self._choices.setdefault(delta.index, _Choice())
        choice.text.append(delta.text)
        choice.is_cut = delta.finish_reason == "length"
        if delta.call is not None:
            name, arguments = choice.calls.setdefault(delta.call.index, ([], []))
            name.append(delta.call.name or "")
            arguments.append(delta.call.arguments)

    async def check(self, index: int) -> bool | None:
        """Return True if a finished choice is valid, and count it; None if that is unknown.

        It is unknown if every schema is enforced, the choice was cut, or the deadline has passed.
        """
        if (choice := self._choices.pop(index, None)) is None:
            return None
        results: list[bool | None] = []
        try:
            async with until_deadline(self._job.caller):
                for schema, answer in [] if choice.is_cut else self._schemas(choice):
                    check = self._engine.matches_schema
                    results.append(await self._pool.run(check, schema, answer, kind="checks"))
        except DeadlineExceeded:
            results.append(None)
        is_valid = None if None in results or not results else all(results)
        if False in results:
            is_valid = False
            log.info("schema_violated", model=self._name, unenforced=list(self.unenforced[:16]))
        outcome = {True: "valid", False: "invalid", None: "unknown"}[is_valid]
        metrics.of(metrics.CHECKED_ANSWERS, self._name, outcome).inc()
        return is_valid

    def _schemas(self, choice: _Choice) -> list[tuple[str, str]]:
        """Return pairs of a schema and the text to check by it."""
        functions = {} if self._job.calling is None else {
            each.name: each for each in self._job.calling.functions
        }  # fmt: skip
        found = []
        for name, arguments in choice.calls.values():
            function = functions.get("".join(name))
            is_forced = self._job.calling is not None and self._job.calling.forced
            if function is not None and (is_forced or function.strict):
                found.append((json.dumps(dict(function.parameters)), "".join(arguments)))
        grammar = self._job.grammar
        if grammar is not None and grammar.kind == "json_schema" and not choice.calls:
            found.append((grammar.source, "".join(choice.text)))
        return found
