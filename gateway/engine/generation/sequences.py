"""The sequences of one chat model, which join and leave between steps. Call it on the lane."""

import math
from collections import abc, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import mlx.core as mx

from gateway.engine.device import launch
from gateway.engine.drafts.draft_policy import DraftPolicy
from gateway.engine.generation.decode_batch import (
    DecodeBatch,
    SequenceOutput,
    choose_tokens,
    count_ahead_pass,
    plan_reading,
    redraw_unsure,
)
from gateway.engine.generation.label_scoring import score_labels
from gateway.engine.generation.prefill import Prefill, PrefillBatch
from gateway.engine.generation.prepare import ChatSetup
from gateway.engine.generation.prompt_scoring import max_scored_tokens
from gateway.engine.generation.sampling import Sampler
from gateway.engine.generation.self_test import ALONE, is_listed
from gateway.engine.generation.sequence import Faults, Sequence
from gateway.engine.kv.cache import compact
from gateway.engine.kv.layers import can_batch, hold_states, padded, row_lengths
from gateway.engine.kv.prefix_cache import PrefixCache
from gateway.engine.vision.sight import Sight
from gateway.jobs.chat import Delta
from gateway.jobs.steps import Pass, SequenceParams, StepPlan, Verdict

Applied: TypeAlias = Callable[[abc.Sequence[int]], AbstractContextManager[None]]


class Sequences:
    """The sequences of one model, from join to last token.

    If a pass fails, each of its sequences is read again, alone. A sequence that fails again alone
    ends with an error.
    """

    def __init__(
        self,
        model: Any,
        setup: ChatSetup,
        *,
        prefixes: PrefixCache,
        drafts: DraftPolicy,
        faults: Faults,
        applied: Applied,  # returns a context manager that applies the rows' adapters
        pass_s: float | None,  # seconds; after a longer pass, the next is evaluated in parts
        sight: Sight | None = None,
    ) -> None:
        self.last_pass = Pass()
        self._model: Any = model
        self._answers, self._structured = setup.chat.answers, setup.structured
        self._vocab_size = setup.vocab_size
        self._prefixes, self._applied = prefixes, applied
        self._drafts, self._faults = drafts, faults
        max_scored = max_scored_tokens(setup.vocab_size)
        self._sight = sight
        self._prefill = Prefill(model, prefixes, max_scored, applied, pass_s, sight)
        self._running: DecodeBatch | None = None
        self._queued: deque[DecodeBatch] = deque()  # without batching: one waiting sequence each
        self._parked: dict[int, Sequence | DecodeBatch] = {}
        self._untold: list[Delta] = []  # last deltas of sequences that failed when another left
        self._may_batch = True  # False once a verdict forbids batches
        if not can_batch(model):
            self.apply_verdict(ALONE)

    @property
    def is_batched(self) -> bool:
        return self._prefill.is_batched

    def apply_verdict(self, verdict: Verdict) -> None:
        """Turn off the modes that failed a self-test, for sequences that are read from now on."""
        # Before the self-test has ended, only architectures that are known to batch do so.
        self._may_batch = self._may_batch and not verdict.forbids_batches
        is_trusted = verdict.is_whole or is_listed(self._model)
        self._prefill.is_batched = self._may_batch and is_trusted
        self._prefill.is_plain = self._prefill.is_plain or verdict.single is False
        if False in (verdict.single, verdict.prefixes):
            self._prefixes.stop()

    @property
    def reading(self) -> frozenset[int]:
        return frozenset(seq.id for seq in self._prefill.seqs)

    @property
    def decoding(self) -> int:
        running = 0 if self._running is None else len(self._running.seqs)
        return running + len(self._queued)

    @property
    def nbytes(self) -> int:
        batches = [self._running, *self._queued, *self._parked.values()]
        kv = sum(batch.nbytes for batch in batches if isinstance(batch, DecodeBatch))
        return kv + self._prefill.nbytes

    def release(self, plan: StepPlan) -> list[Delta]:
        """Drop, preempt and cap sequences as planned; return the deltas of those that end here."""
        self.last_pass = Pass()
        for number in plan.leaving:
            self.leave(number)
        for number in plan.preempting:
            self._preempt(number)
        return [delta for number, limit in plan.capped for delta in self._cap_tokens(number, limit)]

    def admit(self, plan: StepPlan) -> list[Delta]:
        """Add, park and resume sequences as planned; return the deltas of those that failed."""
        deltas, self._untold = self._untold, []
        for number, params in plan.joining:
            try:
                self._prefill.add(self.begin(number, params))
            except Exception as error:
                deltas.append(Delta(params.index, id=number, error=str(error)))
        for number in plan.parking:
            self._park(number)
        for number in plan.resuming:
            self._resume(number)
            if number in plan.parking:
                self._park(number)
        self._drafts.allowed = plan.drafters
        return deltas

    def begin(self, number: int, params: SequenceParams) -> Sequence:
        answers = self._answers
        images = None if self._sight is None else self._sight.begin(params)
        sampler = Sampler(params.sampling, self._vocab_size, params.prompt)
        output, thinking = answers.output_processor(params), answers.thinking(params)
        seq = Sequence(number, params, sampler, output, answers.eos_ids, thinking, images)
        seq.stops_at_blocks = self._prefixes.needs_block_ends and self._prefixes.keeps_growing
        return seq

    def leave_adapter(self, adapter: int) -> None:
        self.synchronize()
        for seq in self._all():
            if seq.adapter == adapter:
                self.leave(seq.id)
        self.synchronize()  # a later wait would raise an error of the running step

    def leave(self, sequence_id: int) -> None:
        """Drop a sequence in any state; ignore an unknown id."""
        self.synchronize()
        self._parked.pop(sequence_id, None)
        self._prefill.drop(sequence_id)
        self._faults.dismiss(sequence_id)
        self._queued = deque(batch for batch in self._queued if batch.seqs[0].id != sequence_id)
        if self._running is None:
            return
        staying = [i for i, seq in enumerate(self._running.seqs) if seq.id != sequence_id]
        seqs = [self._running.seqs[i] for i in staying]
        fault = self._attempt(partial(self._keep, staying))
        if fault is not None:
            self._untold += self._blame(seqs, fault)

    def _park(self, sequence_id: int) -> None:
        """Pause a sequence, once its prompt is read, and keep its KV."""
        self._prefill.hold(sequence_id, True)
        for batch in tuple(self._queued):
            if batch.seqs[0].id == sequence_id:
                self._queued.remove(batch)
                self._parked[sequence_id] = batch
        self.synchronize()  # an error of the running step belongs to this sequence too
        running = self._running
        if running is None:
            return
        for place, seq in enumerate(running.seqs):
            if seq.id == sequence_id:
                self._parked[sequence_id] = running.take(place)
                self._keep([i for i in range(len(running.seqs)) if i != place])
                return

    def _preempt(self, sequence_id: int) -> None:
        seq = self._find(sequence_id)
        if seq is not None:
            self.leave(sequence_id)
            seq.preempt()
            self._parked[sequence_id] = seq

    def _resume(self, sequence_id: int) -> None:
        self._prefill.hold(sequence_id, False)
        parked = self._parked.pop(sequence_id, None)
        if isinstance(parked, Sequence):
            parked.is_held = False
            self._prefill.readmit([parked])
        elif parked is not None:
            parked.seqs[0].is_held = False  # if it is read again, it must not be parked
            self._extend(parked)

    def _cap_tokens(self, sequence_id: int, max_tokens: int) -> list[Delta]:
        seq = self._find(sequence_id)
        if seq is None:
            return []
        seq.cap_tokens(max_tokens)
        if len(seq.tokens) < max_tokens:
            return []
        self.leave(sequence_id)
        return seq.end_early()

    def prefill(self, token_budget: int, encoding_s: float = math.inf) -> list[Delta]:
        """Read a chunk of the next prompts; start to decode the prompts that are complete."""
        batch = self._prefill.next_batch(token_budget)
        if batch is None:
            return []
        # mlx-lm's batch frees buffers after each chunk, which is safe only if no step is running.
        self.synchronize()
        try:
            self.last_pass = self._prefill.read(batch, token_budget, encoding_s)
            if not batch.is_read:
                return []
            return self._start(batch)
        except Exception as error:
            return self._blame(batch.seqs, error)

    def decode(self) -> list[Delta]:
        """Read the running step's tokens, launch the next step, and return the deltas."""
        while self._queued and (self._running is None or self.is_batched):
            self._extend(self._queued.popleft())
        running = self._running
        if running is None:
            return []
        limit = self._drafts.count_ahead(running.seqs, running.cache)
        if limit or any(running.drafts):
            return self._decode_ahead(running, limit)
        self._drafts.drafter = None
        try:
            outputs, logits = self._read_and_launch(running)
        except Exception as error:
            self._running = None
            return self._blame(running.seqs, error)
        for output in outputs:
            output.append_first()
        self.last_pass = Pass(len(outputs), len(outputs), len(outputs))
        fault = self._attempt(partial(self._choose_next, running, outputs, logits))
        deltas = [delta for output in outputs for delta in output.to_deltas(output.end)]
        if fault is None:
            fault = self._attempt(self._drop_ended)
        if fault is not None:
            seqs = [output.seq for output in outputs if output.goes_on and not output.seq.is_over]
            deltas += self._blame(seqs, fault)
        return deltas

    def _read_and_launch(
        self, running: DecodeBatch
    ) -> tuple[list[SequenceOutput], mx.array | None]:
        """Return the running step's tokens, and the next pass's logits if it was launched."""
        running.check()
        running.keep_block_ends(self._prefixes)
        if not running.can_take_back:
            redraw_unsure(running)
        logits = None
        # The next pass is launched before the tokens are read, so that the device doesn't wait for
        # Python. A sequence that ends here then runs one step too many.
        if running.may_go_on:
            logits = self._launch_next(running)
        if redraw_unsure(running) and logits is not None:
            running.take_back()
            logits = None
        return running.read(), logits

    def _choose_next(
        self, running: DecodeBatch, outputs: list[SequenceOutput], logits: mx.array | None
    ) -> None:
        """Drop the sequences that these tokens end; choose the next tokens of the others."""
        ended = [i for i, output in enumerate(outputs) if output.end is not None]
        staying = [i for i, output in enumerate(outputs) if output.goes_on]
        running.keep_answers(self._prefixes, ended)
        self._keep(staying)
        if self._running is None:
            return
        if logits is None:
            logits = self._launch_next(running)
        elif len(staying) < len(outputs):
            logits = logits[mx.array(compact(staying))]
        self._running = choose_tokens(self._structured, running.seqs, running.cache, logits)

    def _drop_ended(self) -> None:
        """Drop the sequences that their newest text ends, for example with a stop string."""
        running = self._running
        if running is not None:
            ended = [i for i, seq in enumerate(running.seqs) if seq.is_over]
            running.keep_answers(self._prefixes, ended)
            self._keep([i for i in range(len(running.seqs)) if i not in ended])

    def _attempt(self, act: Callable[[], None]) -> Exception | None:
        """Call `act`; if it raises, drop the running batch and return the error."""
        try:
            act()
        except Exception as error:
            self._running = None
            return error
        return None

    def _decode_ahead(self, running: DecodeBatch, limit: int) -> list[Delta]:
        """Read the running step's tokens, then launch a speculative pass, which depends on them."""
        drafts = running.drafts
        try:
            running.check()
            redraw_unsure(running)
            outputs = running.read()
        except Exception as error:
            self._running = None
            return self._blame(running.seqs, error)
        deltas: list[Delta] = []
        counts, staying = [], []
        for i, output in enumerate(outputs):
            new_deltas, goes_on = output.append(limit)
            deltas += new_deltas
            counts.append(sum(delta.tokens for delta in new_deltas))
            if goes_on:
                staying.append(i)
        self.last_pass = count_ahead_pass(outputs, counts, drafts, self._drafts.drafter)
        seqs = [outputs[i].seq for i in staying]
        for i in staying:
            if drafts[i]:
                self._drafts.note(outputs[i].seq, len(outputs[i].tokens) - 1)
        try:
            ended = [i for i, output in enumerate(outputs) if output.is_finite and i not in staying]
            running.keep_block_ends(self._prefixes, row_lengths(running.cache))
            running.keep_answers(self._prefixes, ended)
            self._keep(staying)
            if self._running is not None:
                self._running = self._read_ahead(self._running, limit)
        except Exception as error:
            self._running = None
            return deltas + self._blame(seqs, error)
        return deltas

    def _read_ahead(self, running: DecodeBatch, limit: int) -> DecodeBatch:
        """Launch a pass with up to `limit` speculative tokens per row, and the choice after it."""
        running.settle()  # otherwise the draft model would raise the step's error
        running.check()
        lengths = row_lengths(running.cache)
        draft = partial(self._drafts.draft, running.cache)
        reading = plan_reading(running.seqs, lengths, limit, draft)
        for seq, tokens, padding in zip(running.seqs, reading.inputs, reading.padding, strict=True):
            seq.read_last = len(tokens) - padding
        if any(reading.drafts):
            hold_states(running.cache)
        inputs = mx.array(reading.inputs)
        logits = self._launch_pass(running.seqs, inputs, running.cache, reading.padding)
        logits = logits.reshape(-1, logits.shape[-1])[mx.array(reading.places)]
        return choose_tokens(self._structured, running.seqs, running.cache, logits, reading.drafts)

    def synchronize(self) -> None:
        if self._running is not None:
            self._running.wait()

    def _start(self, batch: PrefillBatch) -> list[Delta]:
        """Run the pass of each prompt's last token. Answers of at most one token end here."""
        if batch.seqs[0].params.max_tokens == 0:
            return [seq.echo_delta() for seq in batch.seqs]
        inputs = mx.array([seq.context[-1:] for seq in batch.seqs])
        cache = batch.lm_batch.prompt_cache
        logits = self._launch_pass(batch.seqs, inputs, cache)[:, -1]
        if batch.seqs[0].params.step is not None:
            scored = score_labels(batch.seqs, logits)
            for seq, delta in zip(batch.seqs, scored, strict=True):
                self._clear_or_dismiss(seq, is_finite=delta.error is None)
            return scored
        started = choose_tokens(self._structured, batch.seqs, cache, logits)
        ending = [i for i, seq in enumerate(batch.seqs) if seq.is_at_last]
        deltas: list[Delta] = []
        if ending or batch.seqs[0].is_suspect:
            redraw_unsure(started)
            for i, output in enumerate(started.read()):
                self._clear_or_dismiss(output.seq, is_finite=output.is_finite)
                if i in ending:
                    output.append_first()
                    deltas += output.to_deltas(output.end)
        if len(ending) == len(batch.seqs):
            return deltas
        if ending:
            started.keep([i for i in range(len(batch.seqs)) if i not in ending])
        staying = [i for i, seq in enumerate(started.seqs) if not seq.is_held]
        if len(staying) < len(started.seqs):
            started.wait()
            for i, seq in enumerate(started.seqs):
                if seq.is_held:
                    self._parked[seq.id] = started.take(i)
            if not staying:
                return deltas
            started.keep(staying)
        self._extend(started)
        return deltas

    def _extend(self, started: DecodeBatch) -> None:
        if self._running is None:
            self._running = started
        elif self.is_batched:
            self._running.extend(started)
        else:
            started.wait()
            self._queued.append(started)

    def _all(self) -> list[Sequence]:
        seqs = self._prefill.seqs
        for inside in (self._running, *self._queued, *self._parked.values()):
            if isinstance(inside, Sequence):
                seqs.append(inside)
            elif inside is not None:
                seqs += inside.seqs
        return seqs

    def close(self) -> None:
        self._prefill.close()
        self._queued.clear()
        self._parked.clear()
        self._running = self._model = None

    def _find(self, sequence_id: int) -> Sequence | None:
        return next((seq for seq in self._all() if seq.id == sequence_id), None)

    def _clear_or_dismiss(self, seq: Sequence, *, is_finite: bool) -> None:
        """Record whether a sequence succeeded alone; stop batching after too many faults."""
        seq.is_suspect = False
        if is_finite:
            self._faults.clear_of_blame(seq.id)
        else:
            self._faults.dismiss(seq.id)
        if self._faults.is_batching_to_blame:
            self.apply_verdict(Verdict(rows=False))

    def _launch_next(self, running: DecodeBatch) -> mx.array:
        tokens, cache = running.tokens[:, None], running.cache
        return self._launch_pass(running.seqs, tokens, cache, under_way=running)[:, -1]

    def _launch_pass(
        self,
        seqs: abc.Sequence[Sequence],
        tokens: mx.array,
        cache: list[Any],
        padding: abc.Sequence[int] = (),
        under_way: DecodeBatch | None = None,
    ) -> mx.array:
        """Launch the pass that reads tokens, (rows, n); return logits, (rows, n, vocabulary).

        `padding` counts the padding tokens at each row's end.
        """
        with (
            self._applied([seq.adapter for seq in seqs]),
            self._sight.placed(seqs) if self._sight is not None else nullcontext(),
            padded(cache, tokens.shape[1], padding),
        ):
            logits: mx.array = self._model(tokens, cache=cache)
        if under_way is not None:
            under_way.settle()
            under_way.check()
        # The caches are launched too: some of their arrays don't affect the logits, and their
        # graphs would grow with each token (mlx-lm #1845).
        launch(logits, [layer.state for layer in cache])
        return logits

    def _keep(self, indices: list[int]) -> None:
        if self._running is None or not indices:
            self._running = None
            self._drafts.keep([])
            return
        self._running.keep(indices)
        self._drafts.keep(self._running.seqs)

    def _blame(self, seqs: list[Sequence], error: Exception) -> list[Delta]:
        """Queue the sequences to be read again, or end a suspect that failed alone."""
        self._prefill.forget(seqs)
        self._drafts.forget()
        end = self._faults.blame(seqs, error)
        if end is not None:
            return [end]
        self._prefill.readmit(seqs)
        return []
