"""The sequences of one chat model: they join and leave between steps. All of it runs on the lane.

The prompt pass is mlx-lm's. The decode step is ours, so that a prefill chunk and a decode step are
separate calls (mlx-lm's `next()` does both in one).
"""

from collections import abc, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from gateway.engine.bounds import Bounds
from gateway.engine.device import clear_cache, launch
from gateway.engine.drafts.draft_model import DraftModel
from gateway.engine.drafts.draft_policy import DraftPolicy
from gateway.engine.generation.batch_faults import Faults
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
from gateway.engine.generation.prepare import begin_sequence
from gateway.engine.generation.scoring import max_scored_tokens
from gateway.engine.generation.self_test import ALONE, is_listed
from gateway.engine.generation.sequence import Sequence
from gateway.engine.grammar.structured import StructuredOutput
from gateway.engine.kv.cache import can_batch, compact, rewind_layers
from gateway.engine.kv.prefix_cache import PrefixCache
from gateway.engine.models.adapters import Adapters
from gateway.engine.models.checkpoint import measure_kv
from gateway.engine.prompting.chat_tokenizer import ChatTokenizer
from gateway.jobs import (
    Delta,
    Pass,
    SequenceParams,
    Verdict,
)


class Sequences:
    """The sequences of one model, from join to last token.

    A step that raises never changes another sequence's answer: the batch is thrown away, and each
    sequence is read again, alone, from its tokens so far. One that fails alone ends with an error.
    """

    def __init__(
        self,
        model: Any,
        chat: ChatTokenizer,
        structured: StructuredOutput,
        *,
        vocab_size: int,
        prefix_cache_bytes: int,
        speculate_rows: int,
        draft_model: DraftModel | None,
        bounds: Bounds,
    ) -> None:
        self._model: Any = model
        self._chat = chat
        self._structured = structured
        self._vocab_size = vocab_size
        empty, states = make_prompt_cache(model), measure_kv(model).states
        self._prefixes = PrefixCache(empty, prefix_cache_bytes, bounds.kept, states)
        self.adapters = Adapters(model)
        self._prefill = Prefill(
            model,
            self._prefixes,
            max_scored_tokens(vocab_size),
            self.adapters.applied,
            bounds.pass_s,
        )
        self._running: DecodeBatch | None = None
        self._queued: deque[DecodeBatch] = deque()  # of one sequence each, if not batched
        self._faults = Faults()
        self._drafts = DraftPolicy(speculate_rows, draft_model, self._faults.record_draft)
        self._may_batch = True  # no verdict forbids it
        if not can_batch(model):
            self.apply_verdict(ALONE)
        self._parked: dict[int, Sequence | DecodeBatch] = {}
        self.last_pass = Pass()
        self._untold: list[Delta] = []  # of rows that ended as another left

    @property
    def is_prefilling(self) -> bool:
        """Return True while a sequence has prompt left to read."""
        return not self._prefill.is_empty

    @property
    def is_decoding(self) -> bool:
        """Return True while a sequence is decoding."""
        return self._running is not None or bool(self._queued)

    @property
    def is_batched(self) -> bool:
        """Return True while sequences share passes, False once they run one at a time."""
        return self._prefill.is_batched

    def apply_verdict(self, verdict: Verdict) -> None:
        """Stop using what a verdict finds wrong, from the next sequence to be read on. Until one
        is whole, only architectures that are known to be equal are batched.
        """
        self._may_batch = self._may_batch and not verdict.forbids_batches
        is_trusted = verdict.is_whole or is_listed(self._model)
        self._prefill.is_batched = self._may_batch and is_trusted
        self._prefill.is_plain = self._prefill.is_plain or verdict.single is False
        if False in (verdict.single, verdict.prefixes):
            self._prefixes.stop()

    @property
    def rows(self) -> int:
        """Count the sequences inside, reading or decoding."""
        running = self._running
        queued = len(self._queued)
        return len(self._prefill) + queued + (0 if running is None else len(running.rows))

    def join(self, number: int, params: SequenceParams) -> None:
        """Queue a sequence for prefill."""
        self._prefill.add(begin_sequence(number, params, self._chat, self._vocab_size))

    def leave(self, sequence_id: int) -> None:
        """Drop a sequence, in whatever state it is. An unknown id is ignored."""
        self.synchronize()
        self._parked.pop(sequence_id, None)
        self._prefill.drop(sequence_id)
        self._faults.dismiss(sequence_id)
        self._queued = deque(each for each in self._queued if each.rows[0].id != sequence_id)
        if (running := self._running) is not None:
            staying = [i for i, row in enumerate(running.rows) if row.id != sequence_id]
            rows = [running.rows[i] for i in staying]
            fault = self._attempt(partial(self._keep, staying))
            if fault is not None:  # it is not the others' fault: they are read again
                self._untold += self._blame(rows, fault)

    def park(self, sequence_id: int) -> None:
        """Stop a sequence, keeping its KV and next token. One being read stops after that."""
        for row in self._prefill.rows:
            if row.id == sequence_id:
                row.is_held = True
        for single in [each for each in self._queued if each.rows[0].id == sequence_id]:
            self._queued = deque(each for each in self._queued if each is not single)
            self._parked[sequence_id] = single
        self.synchronize()  # an error of the step under way is of this sequence too
        if (running := self._running) is not None:
            for at in [i for i, row in enumerate(running.rows) if row.id == sequence_id]:
                self._parked[sequence_id] = running.take(at)
                self._keep([other for other in range(len(running.rows)) if other != at])

    def preempt(self, sequence_id: int) -> None:
        """Stop a sequence and free its KV: when resumed, all its tokens are read again."""
        if (row := self._find(sequence_id)) is not None:
            self.leave(sequence_id)
            row.preempt()
            self._parked[sequence_id] = row

    def resume(self, sequence_id: int) -> None:
        """Continue a sequence that was parked or preempted. An unknown id is ignored."""
        for row in self._prefill.rows:
            if row.id == sequence_id:
                row.is_held = False
        parked = self._parked.pop(sequence_id, None)
        if isinstance(parked, Sequence):
            parked.is_held = False
            self._prefill.readmit([parked])
        elif parked is not None:
            parked.rows[0].is_held = False  # or it would stop again once it is read anew
            self._extend(parked)

    def cap_tokens(self, sequence_id: int, max_tokens: int) -> list[Delta]:
        """Limit an answer, if its id is known; end it here if it already has as many tokens."""
        if (row := self._find(sequence_id)) is not None:
            row.cap_tokens(max_tokens)
            if len(row.tokens) >= max_tokens:
                self.leave(sequence_id)
                return row.end_early()
        return []

    def clear_prefixes(self) -> None:
        """Drop the KV kept of prompts."""
        self.synchronize()  # the buffers' wait would raise, and lose, an error of the step
        self._prefixes.clear()
        self._drafts.clear_prefixes()
        clear_cache()

    @property
    def prefix_bytes(self) -> int:
        """Count the bytes of KV kept of prompts that others may begin with."""
        return self._prefixes.nbytes + self._drafts.prefix_bytes

    def prefix_names(self, adapter: int = 0) -> abc.Sequence[bytes]:
        """Return a router's names of the prefixes that are kept. Safe on any thread."""
        return self._prefixes.names(-adapter)

    def drop_adapter(self, number: int) -> None:
        """Free an adapter, with its sequences and the KV kept of their prompts."""
        self.synchronize()
        for row in self._sequences():
            if row.adapter == number:
                self.leave(row.id)
        self._prefixes.forget(-number)
        self.adapters.drop(number)
        clear_cache()

    def prefill(self, token_budget: int) -> list[Delta]:
        """Read one chunk of the next prompts in line; those read whole start to decode."""
        if (batch := self._prefill.next_batch(token_budget)) is None:
            return []
        # mlx-lm's batch gives freed buffers back after each chunk: the step under way must be over.
        self.synchronize()
        try:
            self.last_pass = self._prefill.read(batch, token_budget)
            return self._start(batch) if batch.is_read else []
        except Exception as error:
            return self._blame(batch.rows, error)

    def decode(self) -> list[Delta]:
        """Take the tokens of the step under way, launch the next step, then return the deltas.

        The next pass needs no token on the host: it is launched before they are read, so the device
        never waits for Python. A sequence that ends here has run for one step too many, at most.
        """
        while self._queued and (self._running is None or self.is_batched):
            self._extend(self._queued.popleft())
        if (running := self._running) is None:
            return []
        if (most := self._drafts.count_ahead(running.rows, running.cache)) or any(running.drafts):
            return self._decode_ahead(running, most)
        try:
            outputs, logits = self._read_and_launch(running)
        except Exception as error:
            self._running = None
            return self._blame(running.rows, error)
        for output in outputs:
            output.append_first()
        self.last_pass = Pass(len(outputs), len(outputs), len(outputs))
        fault = self._attempt(partial(self._choose_next, running, outputs, logits))
        deltas = [delta for output in outputs for delta in output.to_deltas(output.end)]
        if fault is None:
            fault = self._attempt(self._drop_ended)
        if fault is not None:
            rows = [output.row for output in outputs if output.goes_on and not output.row.is_over]
            deltas += self._blame(rows, fault)
        return deltas

    def _read_and_launch(
        self, running: DecodeBatch
    ) -> tuple[list[SequenceOutput], mx.array | None]:
        """Return the tokens of the step under way, and the logits of the pass that was launched to
        read them: None if it must wait.
        """
        running.check()
        running.keep_block_ends(self._prefixes)
        if not running.can_take_back:
            redraw_unsure(running)
        logits = None
        if running.may_go_on:
            inputs = running.tokens[:, None]
            logits = self._launch_pass(running.rows, inputs, running.cache)[:, -1]
        if redraw_unsure(running) and logits is not None:
            running.take_back()
            logits = None
        return running.read(), logits

    def _choose_next(
        self, running: DecodeBatch, outputs: list[SequenceOutput], logits: mx.array | None
    ) -> None:
        """Drop the sequences whose last token this was; launch the choice of the others' next."""
        ended = [i for i, output in enumerate(outputs) if output.end is not None]
        staying = [i for i, output in enumerate(outputs) if output.goes_on]
        running.keep_answers(self._prefixes, ended)
        self._keep(staying)
        if self._running is None:
            return
        if logits is None:
            inputs = running.tokens[:, None]
            logits = self._launch_pass(running.rows, inputs, running.cache)[:, -1]
        elif len(staying) < len(outputs):
            logits = logits[mx.array(compact(staying))]
        self._running = choose_tokens(self._structured, running.rows, running.cache, logits)

    def _drop_ended(self) -> None:
        """Drop the sequences that their newest text has ended."""
        if (running := self._running) is not None:
            ended = [i for i, row in enumerate(running.rows) if row.is_over]
            running.keep_answers(self._prefixes, ended)
            self._keep([i for i in range(len(running.rows)) if i not in ended])

    def _attempt(self, act: Callable[[], None]) -> Exception | None:
        """Do something with the batch; return its error, which leaves no batch."""
        try:
            act()
        except Exception as error:
            self._running = None
            return error
        return None

    def _decode_ahead(self, running: DecodeBatch, most: int) -> list[Delta]:
        """Take the tokens of the step under way, then launch the pass that reads them with those
        that come after. Which these are depends on them, so nothing can be launched before.
        """
        drafts = running.drafts
        try:
            running.check()
            redraw_unsure(running)
            outputs = running.read()
        except Exception as error:
            self._running = None
            return self._blame(running.rows, error)
        taken = [each.append(most) for each in outputs]
        deltas = [delta for some, _ in taken for delta in some]
        given = [sum(delta.tokens for delta in some) for some, _ in taken]
        self.last_pass = count_ahead_pass(outputs, given, drafts)
        on = [i for i, (_, is_on) in enumerate(taken) if is_on]
        rows = [outputs[i].row for i in on]
        for i in on:
            if drafts[i]:
                self._drafts.note(outputs[i].row, len(outputs[i].tokens) - 1)
        try:
            ended = [i for i, each in enumerate(outputs) if each.is_finite and i not in on]
            running.keep_answers(self._prefixes, ended)
            self._keep(on)
            if self._running is not None:
                self._running = self._read_ahead(self._running, most)
        except Exception as error:
            self._running = None
            return deltas + self._blame(rows, error)
        return deltas

    def _read_ahead(self, running: DecodeBatch, most: int) -> DecodeBatch:
        """Launch the pass that reads up to `most` tokens ahead; return the choice that follows."""
        lengths = running.cache[0].lengths.counts
        reading = plan_reading(running.rows, lengths, most, self._drafts.draft)
        logits = self._launch_pass(running.rows, mx.array(reading.inputs), running.cache)
        rewind_layers(running.cache, reading.padding)
        some = logits.reshape(-1, logits.shape[-1])[mx.array(reading.places)]
        return choose_tokens(self._structured, running.rows, running.cache, some, reading.drafts)

    def synchronize(self) -> None:
        """Wait for the step under way. Its error is raised when it is read: MLX raises it once."""
        if self._running is not None:
            self._running.wait()

    def _start(self, batch: PrefillBatch) -> list[Delta]:
        """Run the last prompt token of each; answers of one token at most end here."""
        if batch.rows[0].job.max_tokens == 0:
            return [row.echo_delta() for row in batch.rows]
        inputs = mx.array([row.context[-1:] for row in batch.rows])
        cache = batch.lm_batch.prompt_cache
        logits = self._launch_pass(batch.rows, inputs, cache)[:, -1]
        if batch.rows[0].job.step is not None:
            scored = score_labels(batch.rows, logits)
            for row, delta in zip(batch.rows, scored, strict=True):
                self._clear_or_dismiss(row, is_finite=delta.error is None)
            return scored
        started = choose_tokens(self._structured, batch.rows, cache, logits)
        last = [row.is_at_last for row in batch.rows]
        deltas: list[Delta] = []
        if any(last) or batch.rows[0].is_suspect:
            redraw_unsure(started)
            for each, is_last in zip(started.read(), last, strict=True):
                self._clear_or_dismiss(each.row, is_finite=each.is_finite)
                if is_last:
                    deltas += each.to_deltas(
                        each.row.append(each.tokens[0]) if each.is_finite else None
                    )
        if all(last):
            return deltas
        if any(last):
            started.keep([i for i, is_last in enumerate(last) if not is_last])
        if held := [i for i, row in enumerate(started.rows) if row.is_held]:
            started.wait()
            for i in held:
                self._parked[started.rows[i].id] = started.take(i)
            if len(held) == len(started.rows):
                return deltas
            started.keep([i for i, row in enumerate(started.rows) if not row.is_held])
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

    def _sequences(self) -> list[Sequence]:
        """List the sequences inside, in whatever state they are."""
        rows = self._prefill.rows
        for running in (self._running, *self._queued, *self._parked.values()):
            if running is not None:
                rows += [running] if isinstance(running, Sequence) else running.rows
        return rows

    def _find(self, sequence_id: int) -> Sequence | None:
        return next((row for row in self._sequences() if row.id == sequence_id), None)

    def _clear_or_dismiss(self, row: Sequence, *, is_finite: bool) -> None:
        """Record the outcome of a sequence read alone; too many faults end batching."""
        row.is_suspect = False
        if is_finite:
            self._faults.clear_of_blame(row.id)
        else:
            self._faults.dismiss(row.id)
        if self._faults.is_batching_to_blame:
            self.apply_verdict(Verdict(rows=False))

    def _launch_pass(
        self, rows: abc.Sequence[Sequence], tokens: mx.array, cache: list[Any]
    ) -> mx.array:
        """Launch the pass that reads tokens, (rows, n); return its logits, (rows, n, vocabulary).

        The caches are evaluated too. What no logits depend on, such as the lengths kept with a
        state, would grow a graph by a node a token, and on Metal a buffer each (mlx-lm #1845).
        """
        with self.adapters.applied([row.adapter for row in rows]):
            logits: mx.array = self._model(tokens, cache=cache)
        launch(logits, [layer.state for layer in cache])
        return logits

    def _keep(self, indices: list[int]) -> None:
        if self._running is not None and indices:
            self._running.keep(indices)
        else:
            self._running = None
        self._drafts.keep(self._running.rows if self._running is not None else [])

    def _blame(self, rows: list[Sequence], error: Exception) -> list[Delta]:
        """Queue every sequence to be read again, alone; end one that was alone already.

        The prefix cache is cleared too, since it may be what broke them.
        """
        self._prefixes.clear()
        self._drafts.forget()
        if (end := self._faults.blame(rows, error)) is not None:
            return [end]
        self._prefill.readmit(rows)
        return []
