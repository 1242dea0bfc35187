"""What a grammar could not hold, checked when an answer is whole."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway import logs, metrics
from gateway.errors import DeadlineExceeded
from gateway.jobs import Delta, GenerateJob
from gateway.serving.admission import until_deadline
from gateway.serving.ports import GenerationEngine
from gateway.serving.tokenize import TokenPool

log = logs.get("generation")


@dataclass(slots=True)
class _Choice:
    """A choice so far: its text, the name and arguments of each call, and whether it was cut."""

    text: list[str] = field(default_factory=list)
    calls: dict[int, tuple[list[str], list[str]]] = field(default_factory=dict)
    is_cut: bool = False


class Verdicts:
    """Gathers the choices of one job and judges them by its schemas, where any is not held whole.

    `unenforced` are pointers to what is not held, behind a function's name where it is of one.
    """

    def __init__(
        self,
        name: str,
        engine: GenerationEngine,
        pool: TokenPool,
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
        """Take what is new in a choice."""
        if not self.unenforced:
            return
        choice = self._choices.setdefault(delta.index, _Choice())
        choice.text.append(delta.text)
        choice.is_cut = delta.finish_reason == "length"
        if delta.call is not None:
            name, arguments = choice.calls.setdefault(delta.call.index, ([], []))
            name.append(delta.call.name or "")
            arguments.append(delta.call.arguments)

    async def of(self, index: int) -> bool | None:
        """Judge a choice that has ended, and count it; None where that cannot be told, or need not.

        A choice that was cut breaks no schema, and one that breaks several counts once. Past the
        caller's deadline nobody can tell.
        """
        if (choice := self._choices.pop(index, None)) is None:
            return None
        verdicts: list[bool | None] = []
        try:
            async with until_deadline(self._job.caller):
                for judged in [] if choice.is_cut else self._schemas(choice):
                    fits = await self._pool.run(self._engine.fits, *judged, kind="verdicts")
                    verdicts.append(fits)
        except DeadlineExceeded:
            verdicts.append(None)
        verdict = None if None in verdicts or not verdicts else all(verdicts)
        if False in verdicts:
            verdict = False
            log.info("schema_violated", model=self._name, unenforced=list(self.unenforced[:16]))
        outcome = {True: "valid", False: "invalid", None: "unknown"}[verdict]
        metrics.of(metrics.CHECKED_ANSWERS, self._name, outcome).inc()
        return verdict

    def _schemas(self, choice: _Choice) -> list[tuple[str, str]]:
        """Return pairs of a schema and the answer to judge by it."""
        functions = {} if self._job.calling is None else {
            each.name: each for each in self._job.calling.functions
        }  # fmt: skip
        found = []
        for name, arguments in choice.calls.values():
            function = functions.get("".join(name))
            is_held = self._job.calling is not None and self._job.calling.forced
            if function is not None and (is_held or function.strict):
                found.append((json.dumps(dict(function.parameters)), "".join(arguments)))
        grammar = self._job.grammar
        if grammar is not None and grammar.kind == "json_schema" and not choice.calls:
            found.append((grammar.source, "".join(choice.text)))
        return found
