"""The engine of one chat model. Call it on the lane, except where a method says "any thread"."""

import random
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from gateway.engine.answers.response_template import PREFIX_TOKENS
from gateway.engine.compiled_code import unfused
from gateway.engine.device import DeviceBounds, clear_cache, is_late
from gateway.engine.drafts.draft_model import DraftModel
from gateway.engine.drafts.draft_policy import DraftPolicy
from gateway.engine.drafts.head_drafter import HeadDrafter
from gateway.engine.generation.prepare import ChatSetup, prepare
from gateway.engine.generation.self_test import (
    BatchSelfTest,
    count_tokens,
    is_listed,
    read_probe,
)
from gateway.engine.generation.sequence import Faults
from gateway.engine.generation.sequences import Sequences
from gateway.engine.grammar.compiling import CompiledGrammar
from gateway.engine.kv.layers import is_plain
from gateway.engine.kv.prefix_cache import PrefixCache, PrefixPool
from gateway.engine.models.adapters import Adapters
from gateway.engine.models.decoders import floating_dtype, parameters
from gateway.engine.models.kv_costs import measure_kv
from gateway.engine.vision.sight import Sight
from gateway.jobs.chat import GenerateJob, Grammar, Reading, Sampling
from gateway.jobs.images import FIRST_IMAGE_ID
from gateway.jobs.steps import DraftCost, EngineFacts, SequenceParams, StepPlan, StepResult, Verdict

TIMED_STEPS: Final = 3  # timed steps per batch width, after an untimed first one
_TIMED: Final = Sampling(temperature=0, ignore_eos=True)


class GenerationEngine:
    """A chat model and the sequences that it generates."""

    def __init__(
        self,
        model: Any,
        setup: ChatSetup,
        *,
        prefixes: PrefixPool | None = None,  # None turns the prefix cache off
        speculate_rows: int = 0,
        drafter: DraftModel | HeadDrafter | None = None,
        bounds: DeviceBounds | None = None,
        sight: Sight | None = None,
    ) -> None:
        self._model: Any = model
        self._sight = sight
        self._setup = setup
        self.tokens = setup.chat
        kv_cost, empty = measure_kv(model), make_prompt_cache(model)
        self.prefixes = PrefixCache(empty, prefixes or PrefixPool(0), kv_cost.states)
        self.adapters = Adapters(model)
        if not (is_listed(model) or all(is_plain(layer) for layer in empty)):
            speculate_rows = 0  # rollback of rejected tokens is untested for this model
        self._faults = Faults()
        self._drafts = DraftPolicy(speculate_rows, drafter, self._faults.record_draft)
        self._sequences = Sequences(
            model,
            setup,
            prefixes=self.prefixes,
            drafts=self._drafts,
            faults=self._faults,
            applied=self.adapters.applied,
            pass_s=(bounds or DeviceBounds()).pass_s,
            sight=sight,
        )
        if kv_cost.constant and speculate_rows:
            kv_cost = replace(kv_cost, draft=DraftCost(0, kv_cost.constant, speculate_rows))
        if isinstance(drafter, DraftModel):
            kv_cost = drafter.with_kv(kv_cost, speculate_rows)
        tested_tokens = count_tokens(model, setup.max_context)
        findings = setup.unread_formats, setup.notes, setup.verified
        self.facts = EngineFacts(
            setup.max_context,
            kv_cost,
            tested_tokens,
            *findings,
            images=None if sight is None else sight.cost,
            drafters=[each.name for each in self._drafts.sources] if speculate_rows else (),
            is_timed_when_idle=is_late(),
        )

    @property
    def dtype(self) -> mx.Dtype:
        return floating_dtype(self._model)

    @property
    def is_batched(self) -> bool:
        return self._sequences.is_batched

    def self_test(self) -> Generator[Verdict]:
        """Test whether batching works. Each `next` runs the model once, and yields the verdict so
        far.
        """
        vocab_size, max_context = self._setup.vocab_size, self._setup.max_context
        test = BatchSelfTest(self._model, vocab_size, max_context, self.dtype, self._sight)
        return test.verdicts()

    def time_step(self, rows: int) -> Generator[float | None]:
        """Time a decode step of `rows` made-up sequences; each `next` runs the model once.

        Yield None until the last pass, then the seconds per step. Raises RuntimeError.
        """
        faults, draw = Faults(), random.Random(0)
        sequences = Sequences(
            self._model,
            self._setup,
            prefixes=PrefixCache(make_prompt_cache(self._model), PrefixPool(0)),
            drafts=DraftPolicy(0, None, faults.record_draft),
            faults=faults,
            applied=self.adapters.applied,
            pass_s=None,
        )
        joining = []
        for number in range(rows):
            prompt = [draw.randrange(1, self._setup.vocab_size) for _ in range(2)]
            params = SequenceParams(
                prompt=prompt, max_tokens=TIMED_STEPS + 3, sampling=_TIMED, is_bare=True
            )
            joining.append((number, params))
        seconds: list[float] = []
        try:
            sequences.admit(StepPlan(joining=joining))
            while len(seconds) <= TIMED_STEPS:
                is_prefilled, began = not sequences.reading, time.perf_counter()
                if is_prefilled:
                    sequences.decode()
                else:
                    sequences.prefill(len(joining) * 2)
                sequences.synchronize()
                if is_prefilled:
                    seconds.append(time.perf_counter() - began)
                failed = faults.take()
                if failed or (is_prefilled and sequences.last_pass.rows < rows):
                    raise RuntimeError(f"{rows} rows could not be timed: {failed}")
                # Other work on the machine only slows steps down, so the fastest one is used.
                yield min(seconds[1:]) if len(seconds) > TIMED_STEPS else None
        finally:
            sequences.close()
            clear_cache()

    def apply_verdict(self, verdict: Verdict) -> None:
        self._sequences.apply_verdict(verdict)

    @unfused()
    def probe(self) -> None:
        """Run a short prompt to test the device. Raises MLX's errors."""
        self.synchronize()
        read_probe(self._model, self._setup.vocab_size)

    def prepare(self, job: GenerateJob) -> list[SequenceParams]:
        """Return the parameters of a job's sequences. Safe on any thread."""
        return prepare(job, self._setup)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar (slow; any thread). Raises BadRequest if that fails."""
        return self._setup.structured.compile(grammar)

    def matches_schema(self, schema: str, answer: str) -> bool | None:
        """Return whether an answer matches a JSON Schema; None if undecided (slow; any thread)."""
        return self._setup.structured.matches_schema(schema, answer)

    def read_answer(self, params: SequenceParams, text: str, is_cut: bool) -> Reading:
        """Parse an answer's whole text into its parts (slow; any thread)."""
        chat, reader = self._setup.chat, self._setup.reader
        assert reader is not None
        ending = params.prompt[-PREFIX_TOKENS:]
        prefix = chat.decode([token for token in ending if token < FIRST_IMAGE_ID])
        calls = chat.answers.call_writer(params)
        return reader.read(params, text, prefix, calls, is_cut=is_cut)

    def step(self, plan: StepPlan) -> StepResult:
        sequences = self._sequences
        deltas = sequences.release(plan)
        if plan.clear_prefixes:
            self._clear_prefixes()
        if plan.prefix_limit is not None:
            self._limit_prefixes(plan.prefix_limit)
        deltas += sequences.admit(plan)
        if plan.kind == "prefill":
            deltas += sequences.prefill(plan.token_budget, plan.encoding_s)
        elif plan.kind == "decode":
            deltas += sequences.decode()
        faults = self._faults.take() if plan.kind is not None else ()
        drafter = self._drafts.drafter if plan.kind == "decode" else None
        size, reading, decoding = sequences.last_pass, sequences.reading, sequences.decoding
        kept = self.prefixes.pool_bytes
        return StepResult(deltas, size, faults, reading, decoding, kept, drafter)

    def _clear_prefixes(self) -> None:
        self.synchronize()  # keeps the running step's error, which clear_cache would raise here
        self.prefixes.clear()
        self._drafts.clear_prefixes()
        if self._sight is not None:
            self._sight.clear()
        clear_cache()

    def _limit_prefixes(self, nbytes: int) -> None:
        pool = self.prefixes.pool
        pool.limit = nbytes
        if pool.nbytes > nbytes:
            self.synchronize()
            pool.shrink()
            clear_cache()

    def synchronize(self) -> None:
        """Wait for the running step, and keep its error until its tokens are read."""
        self._sequences.synchronize()

    def routing_keys(self, adapter: int = 0) -> Sequence[bytes]:
        """Return the routing keys of the cached prompts. Safe on any thread."""
        return self.prefixes.routing_keys(adapter)

    def drop_adapter(self, number: int) -> None:
        self._sequences.leave_adapter(number)
        self.prefixes.forget(number)
        self.adapters.drop(number)
        clear_cache()

    def nbytes(self) -> int:
        weights = sum(array.nbytes for array in parameters(self._model))
        images = 0 if self._sight is None else self._sight.nbytes
        kept = self.prefixes.nbytes + self._drafts.nbytes + images
        return weights + self._sequences.nbytes + kept

    def close(self) -> None:
        self._sequences.close()
        self._model = None
        if self._sight is not None:
            self._sight.close()
        self.adapters.close()
        self.prefixes.clear()
        self._drafts.close()
        clear_cache()
