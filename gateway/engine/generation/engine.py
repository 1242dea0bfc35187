"""One chat model: a step changes its batch and runs a pass. On the lane, but for what is said to be
safe on any thread.
"""

from collections.abc import Generator, Mapping
from typing import Any

import mlx.core as mx

from gateway.engine.bounds import Bounds
from gateway.engine.device import clear_cache
from gateway.engine.drafts.draft_model import DraftModel
from gateway.engine.generation.decode_batch import (
    DecodeBatch,
)
from gateway.engine.generation.prepare import prepare_sequences
from gateway.engine.generation.self_test import SelfTest, count_tokens, read_probe
from gateway.engine.generation.sequences import Sequences
from gateway.engine.grammar.compiling import CompiledGrammar
from gateway.engine.grammar.structured import StructuredOutput
from gateway.engine.models.checkpoint import measure_kv
from gateway.engine.models.decoders import floating_dtype, parameters
from gateway.engine.prompting.chat_tokenizer import ChatTokenizer
from gateway.jobs import (
    Delta,
    EngineFacts,
    GenerateJob,
    Grammar,
    Pass,
    SequenceParams,
    StepPlan,
    StepResult,
    Verdict,
)


class GenerationEngine(Sequences):
    """A model with its template, vocabulary and grammars, and the sequences that it answers."""

    def __init__(
        self,
        name: str,
        model: Any,
        chat: ChatTokenizer,
        structured: StructuredOutput,
        *,
        max_context: int,
        vocab_size: int,
        prefix_cache_bytes: int = 0,
        speculate_rows: int = 0,
        draft_model: DraftModel | None = None,
        sampling_defaults: Mapping[str, float] | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        super().__init__(
            model,
            chat,
            structured,
            vocab_size=vocab_size,
            prefix_cache_bytes=prefix_cache_bytes,
            speculate_rows=speculate_rows,
            draft_model=draft_model,
            bounds=bounds or Bounds(),
        )
        self._name = name
        self.tokens = chat
        self._sampling_defaults = sampling_defaults or {}
        kv_cost = measure_kv(model)
        if draft_model is not None:
            kv_cost = draft_model.with_kv(kv_cost, speculate_rows)
        self.facts = EngineFacts(max_context, kv_cost, count_tokens(model, max_context))

    @property
    def dtype(self) -> mx.Dtype:
        return floating_dtype(self._model)

    def self_test(self) -> Generator[Verdict]:
        """Compare sequences in batches with the same alone, a pass a step; yield what is known."""
        test = SelfTest(self._model, self._vocab_size, self.facts.max_context, self.dtype)
        return test.verdicts()

    def probe(self) -> None:
        """Read a prompt of the self-test's, apart from all sequences; raise what MLX does."""
        self.synchronize()
        read_probe(self._model, self._vocab_size)

    def prepare(self, job: GenerateJob) -> list[SequenceParams]:
        """Render, encode and measure a job: one sequence per choice. Safe on any thread."""
        return prepare_sequences(
            job,
            self._chat,
            self._structured,
            self.facts.max_context,
            self._vocab_size,
            self._sampling_defaults,
        )

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar for use by sequences. Slow, and safe on any thread.

        Raises BadRequest naming the keyword or place that cannot be compiled.
        """
        return self._structured.compile(grammar)

    def matches_schema(self, schema: str, answer: str) -> bool | None:
        """Return whether an answer fits a JSON Schema, both as text; None if undecidable. Slow."""
        return self._structured.matches_schema(schema, answer)

    def step(self, plan: StepPlan) -> StepResult:
        """Change the batch as planned, then run a pass; return what came of both."""
        deltas = self._change(plan)
        self.last_pass, faults = Pass(), []
        if plan.kind == "prefill":
            deltas += self.prefill(plan.token_budget)
        elif plan.kind == "decode":
            deltas += self.decode()
        if plan.kind is not None:
            faults = self._faults.take()
        reading = frozenset(row.id for row in self._prefill.rows)
        decoding = self.rows - len(self._prefill)
        return StepResult(deltas, self.last_pass, faults, reading, decoding, self.prefix_bytes)

    def _change(self, plan: StepPlan) -> list[Delta]:
        """Move sequences; return the deltas of those that end by it, or cannot join."""
        for number in plan.leaving:
            self.leave(number)
        for number in plan.preempting:
            self.preempt(number)
        deltas = [
            delta for number, limit in plan.capped for delta in self.cap_tokens(number, limit)
        ]
        if plan.clear_prefixes:
            self.clear_prefixes()
        for number, params in plan.joining:
            try:
                self.join(number, params)
            except Exception as error:
                deltas.append(Delta(params.index, row=number, error=str(error)))
        for number in plan.parking:
            self.park(number)
        for number in plan.resuming:
            self.resume(number)
            if number in plan.parking:
                self.park(number)  # once it is read again
        deltas += self._untold
        self._untold = []
        return deltas

    def nbytes(self) -> int:
        """Count the bytes on the device: weights, KV and prefixes."""
        weights = sum(array.nbytes for array in parameters(self._model))
        batches = [self._running, *self._queued, *self._parked.values()]
        kv = sum(batch.nbytes for batch in batches if isinstance(batch, DecodeBatch))
        return weights + kv + self._prefill.nbytes + self._prefixes.nbytes + self._drafts.nbytes

    def close(self) -> None:
        """Release every array."""
        self._prefill.close()
        self.adapters.close()
        self._prefixes.clear()
        self._queued.clear()
        self._parked.clear()
        self._running = self._model = None
        self._drafts.close()
        clear_cache()
