"""One chat model: a step changes its batch and runs a pass. On the lane, but for what is said to be
safe on any thread.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from gateway.engine.answers.response_template import PREFIX_TOKENS
from gateway.engine.compiled_code import unfused
from gateway.engine.device import clear_cache
from gateway.engine.generation.decode_batch import DecodeBatch
from gateway.engine.generation.label_scoring import prepare_questions
from gateway.engine.generation.self_test import BatchSelfTest, read_probe
from gateway.engine.generation.sequences import Sequences
from gateway.engine.grammar.compiling import CompiledGrammar
from gateway.engine.models.decoders import floating_dtype, parameters
from gateway.errors import BadRequest, ContextLengthExceeded
from gateway.jobs import (
    Delta,
    GenerateJob,
    Grammar,
    Pass,
    PrefixPiece,
    Reading,
    Sampling,
    SequenceParams,
    StepPlan,
    StepResult,
    Verdict,
)


class GenerationEngine(Sequences):
    """A model with its template, vocabulary and grammars, and the sequences that it answers."""

    @property
    def dtype(self) -> mx.Dtype:
        return floating_dtype(self._model)

    def self_test(self) -> Generator[Verdict]:
        """Compare sequences in batches with the same alone, a pass a step; yield what is known."""
        test = BatchSelfTest(self._model, self._vocab_size, self.facts.max_context, self.dtype)
        return test.verdicts()

    @unfused()
    def probe(self) -> None:
        """Read a prompt of the self-test's, apart from all sequences; raise what MLX does."""
        self.synchronize()
        read_probe(self._model, self._vocab_size)

    def prepare(self, job: GenerateJob) -> list[SequenceParams]:
        """Render, encode and measure a job: one sequence per choice, or per step into the labels of
        its questions. Safe on any thread.

        Raises BadRequest for what the template refuses, ContextLengthExceeded for a prompt that
        leaves no room for one token.
        """
        chat, max_context = self._chat, self.facts.max_context
        if job.questions:
            return prepare_questions(job, chat, max_context, self._vocab_size)
        prompt = chat.prompt(job)
        max_tokens = _answer_limit(job, prompt.ids, max_context, self._vocab_size)
        sampling = _complete(job.sampling, self._sampling_defaults)
        grammar = self._structured.grammar(job)
        if job.continues and grammar is not None:
            raise BadRequest(
                "An answer that is continued cannot be held to a form, nor to a strict tool.",
                part="prompt",
            )
        forced = job.calling is not None and job.calling.forced
        is_free = grammar is None and job.prompt is None and not job.continues
        is_unread = self._reader is not None and self._reader.problem is not None
        reads_whole = is_free and self._reader is not None and not is_unread
        unread = self.facts.unread_formats
        knows_calls = chat.answers.reads_calls and "tool_parser" not in unread
        reads_calls = reads_whole or forced or knows_calls
        budget = job.thinking_budget
        if budget is not None and (job.prompt is not None or not chat.answers.ends_thoughts):
            budget = None
        row = SequenceParams(
            prompt=prompt.ids,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=job.stop,
            logprobs=job.logprobs,
            echoed=chat.texts_of(prompt.ids, job.prompt) if job.echo else None,
            calling=job.calling,
            grammar=grammar,
            is_open=job.max_tokens is None,
            is_bare=job.prompt is not None,
            is_continued=job.continues,
            is_thinking=prompt.is_thinking,
            may_think=prompt.may_think,
            opening=prompt.opening,
            thinking_budget=budget,
            is_either=job.grammar is not None,
            calls_are_text=job.calling is not None and not reads_calls,
            thoughts_are_text=job.prompt is None and (is_unread or "reasoning_parser" in unread),
            reads_whole=reads_whole,
            earlier_calls=sum(len(turn.get("tool_calls") or ()) for turn in job.messages),
            beginning=job.caller.prefix_names.ends(len(prompt.ids)),
            adapter=job.adapter,
            cache_salt=job.caller.cache_salt,
        )
        return [
            replace(row, index=i, sampling=_sampling_of_choice(sampling, i)) for i in range(job.n)
        ]

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar for use by sequences. Slow, and safe on any thread.

        Raises BadRequest naming the keyword or place that cannot be compiled.
        """
        return self._structured.compile(grammar)

    def matches_schema(self, schema: str, answer: str) -> bool | None:
        """Return whether an answer fits a JSON Schema, both as text; None if undecidable. Slow."""
        return self._structured.matches_schema(schema, answer)

    def read_answer(self, row: SequenceParams, text: str, is_cut: bool) -> Reading:
        """Return the parts of a sequence's whole text, as ResponseTemplate.read does. Slow, and
        safe on any thread.
        """
        assert self._reader is not None
        prefix = self._chat.decode(row.prompt[-PREFIX_TOKENS:])
        calls = self._chat.answers.call_writer(row)
        return self._reader.read(row, text, prefix, calls, is_cut=is_cut)

    def step(self, plan: StepPlan) -> StepResult:
        """Change the batch as planned, then run a pass; return what came of both."""
        deltas = self._change(plan)
        self.last_pass, faults = Pass(), []
        self._drafts.allowed = plan.drafters
        if plan.kind == "prefill":
            deltas += self.prefill(plan.token_budget)
        elif plan.kind == "decode":
            deltas += self.decode()
        if plan.kind is not None:
            faults = self._faults.take()
        reading = frozenset(row.id for row in self._prefill.rows)
        decoding = self.rows - len(self._prefill)
        drafter = self._drafts.drafter if plan.kind == "decode" else None
        return StepResult(
            deltas, self.last_pass, faults, reading, decoding, self.prefix_bytes, drafter
        )

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
        if plan.prefix_limit is not None:
            self.limit_prefixes(plan.prefix_limit)
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

    def clear_prefixes(self) -> None:
        """Drop the KV kept of prompts."""
        self.synchronize()  # the buffers' wait would raise, and lose, an error of the step
        self._prefixes.clear()
        self._drafts.clear_prefixes()
        clear_cache()

    def limit_prefixes(self, nbytes: int) -> None:
        """Keep at most so much of prompts from now on, with the models that share the room."""
        pool = self._prefixes.pool
        pool.limit = nbytes
        if pool.nbytes > nbytes:
            self.synchronize()
            pool.shrink()
            clear_cache()

    @property
    def prefix_bytes(self) -> int:
        """Count the bytes of KV kept of prompts, by all models that share the room."""
        return self._prefixes.pool.nbytes

    def prefix_names(self, adapter: int = 0) -> Sequence[bytes]:
        """Return a router's names of the prefixes that are kept. Safe on any thread."""
        return self._prefixes.names(adapter)

    def prefix_pieces(self, adapter: int) -> list[PrefixPiece]:
        """List what is kept of an adapter's prompts in pieces for files, the one used last first.

        A draft model's KV of them is not among it: it reads them again.
        """
        return self._prefixes.pieces(adapter)

    def copy_prefix(self, adapter: int, piece: PrefixPiece) -> bytes | None:
        """Return a piece's content; None if some of it has gone meanwhile."""
        return self._prefixes.copy_piece(adapter, piece)

    def put_prefix(self, adapter: int, salt: str, content: bytes) -> bool:
        """Keep the content of a piece of prompts that were read before; False if there is no more
        room. Raises anything for what `copy_prefix` did not return for this model.
        """
        return self._prefixes.put_piece((adapter, salt), content)

    def drop_adapter(self, number: int) -> None:
        """Free an adapter, with its sequences and the KV kept of their prompts."""
        self.synchronize()
        for row in self._sequences():
            if row.adapter == number:
                self.leave(row.id)
        self.synchronize()  # the buffers' wait would take an error of the others' KV
        self._prefixes.forget(number)
        self.adapters.drop(number)
        clear_cache()

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


def _answer_limit(
    job: GenerateJob, prompt: Sequence[int], max_context: int, vocab_size: int
) -> int:
    """Return how many tokens the answer may have. Raises BadRequest, ContextLengthExceeded."""
    room = max_context - len(prompt)
    if room < (job.max_tokens != 0):
        noun = "messages" if job.prompt is None else "prompt"
        raise ContextLengthExceeded(max_context, len(prompt), noun=noun)
    if not prompt:
        raise BadRequest("The prompt is empty.", part="prompt")
    if not all(0 <= token < vocab_size for token in prompt):
        raise BadRequest(f"Token ids are 0 to {vocab_size - 1}.", part="prompt")
    limit = room if job.max_tokens is None else min(job.max_tokens, room)
    if job.sampling.min_tokens > limit:
        raise BadRequest(
            f"Invalid 'min_tokens': the answer may have {limit} tokens at most.", part="min_tokens"
        )
    return limit


def _complete(sampling: Sampling, defaults: Mapping[str, float]) -> Sampling:
    """Fill in the fields that a job leaves unset from the defaults of the model's files."""
    filled: dict[str, Any] = {name: defaults[name] for name in sampling.unset & defaults.keys()}
    return replace(sampling, **filled, unset=frozenset())


def _sampling_of_choice(sampling: Sampling, index: int) -> Sampling:
    """Return the sampling of choice `index`: only the first has the caller's own seed."""
    if sampling.seed is None or index == 0:
        return sampling
    return replace(sampling, seed=sampling.seed + index)
