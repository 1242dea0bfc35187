"""Scripted engines that can be held at every stage, and hang or end as their text tells them."""

import asyncio
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gateway.clock import Stage
from gateway.jobs import TokenIds, Vectors
from gateway.jobs.chat import Compiled, Delta, GenerateJob, Grammar
from gateway.jobs.steps import SequenceParams
from gateway.registry import ModelSpec
from tests.fakes import Gate, ScriptedChat, ScriptedEmbedder, ScriptedEngines

EXIT = "⏻"  # the call with this ends its thread
HANG = "⌛"  # the call with this never ends
HANGS = "the call hangs"  # a line of the log
FAR_AWAY = "far-away"  # a model whose files never come


def gates() -> dict[Stage, Gate]:
    return {stage: Gate() for stage in Stage}


@dataclass
class HeldEmbedder(ScriptedEmbedder):
    """Tokenizing and the pass have a gate each."""

    pass_s: float = 0.0
    gates: dict[Stage, Gate] = field(default_factory=gates)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        self.gates[Stage.TOKENIZE].pass_through()
        return super().encode(texts)

    def embed(self, rows: Sequence[TokenIds]) -> Vectors:
        if any(ord(EXIT) in row for row in rows):
            raise SystemExit
        if any(ord(HANG) in row for row in rows):
            print(HANGS, file=sys.stderr, flush=True)
            threading.Event().wait()
        self.gates[Stage.INFERENCE].pass_through()
        time.sleep(self.pass_s)
        return super().embed(rows)


@dataclass
class HeldWriter(ScriptedChat):
    """Every stage has a gate; that of decoding closes by itself before step `hold_at_step`."""

    max_context: int = 10_000
    hold_at_step: int | None = None
    step_s: float = 0.0
    gates: dict[Stage, Gate] = field(default_factory=gates)

    def prepare(self, job: GenerateJob) -> list[SequenceParams]:
        self.gates[Stage.TOKENIZE].pass_through()
        return super().prepare(job)

    def compile(self, grammar: Grammar) -> Compiled:
        self.gates[Stage.COMPILE].pass_through()
        return super().compile(grammar)

    def prefill(self, token_budget: int) -> list[Delta]:
        self.gates[Stage.PREFILL].pass_through()
        return super().prefill(token_budget)

    def decode(self) -> list[Delta]:
        if any(ord(EXIT) in (row.rest or ()) for row in self.inside("decoding").values()):
            raise SystemExit
        if len(self.steps) == self.hold_at_step:
            self.gates[Stage.DECODE].close()
        self.gates[Stage.DECODE].pass_through()
        time.sleep(self.step_s)
        return super().decode()


@dataclass
class HeldEngines(ScriptedEngines):
    """Both of them."""

    embedder: HeldEmbedder = field(default_factory=HeldEmbedder)
    chat: HeldWriter = field(default_factory=HeldWriter)

    async def find(self, spec: ModelSpec) -> Path | None:
        return None if spec.id == FAR_AWAY else Path()

    async def files(self, spec: ModelSpec, *, is_pull: bool = False) -> Path:
        if spec.id == FAR_AWAY:
            await asyncio.Event().wait()
        return await super().files(spec)

    def open(self) -> None:
        """Let everything go on."""
        self.load_gate.open()
        for gate in (*self.embedder.gates.values(), *self.chat.gates.values()):
            gate.open()
