"""One chat model's batch: rows join and leave between steps. All of it runs on the lane.

The KV caches and the prompt pass are mlx-lm's batch classes; the decode step is ours, so that
a prefill chunk and a decode step are separate calls (mlx-lm's `next()` does both in one).
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from gateway.engine.batches import Running
from gateway.engine.chat import ChatTokenizer
from gateway.engine.decoders import parameters
from gateway.engine.grammar.compiling import CompiledGrammar
from gateway.engine.grammar.structured import Structured
from gateway.engine.planning import planned
from gateway.engine.prefill import Cohort, Prefill
from gateway.engine.prefixes import Prefixes
from gateway.engine.rows import Row
from gateway.engine.sampling import Sampler, adjusted, choose, is_finite, score
from gateway.jobs import GenerateJob, Grammar, Pass, RowDelta, RowJob

Model = Callable[..., mx.array]
_launch: Any = mx.async_eval  # untyped in mlx's stubs
STEPS_PER_CLEAR = 512  # as often as mlx-lm's generator: freed buffers go back to the system


class GenerationEngine:
    """The rows of one model, from join to last token.

    A step that raises never changes a neighbour's answer: its batch is thrown away and every
    row is read again, alone, from what it has said; the row that fails alone ends with an error.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        chat: ChatTokenizer,
        structured: Structured,
        *,
        max_context: int,
        vocab_size: int,
        prefix_cache_bytes: int = 0,
    ) -> None:
        self._name = name
        self._model: Any = model
        self._chat = chat
        self._structured = structured
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._prefixes = Prefixes(make_prompt_cache(self._model), prefix_cache_bytes)
        self._prefill = Prefill(self._model, self._prefixes)
        self._running: Running | None = None
        self.last_pass = Pass()
        self._last_id = 0
        self._steps = 0

    @property
    def max_context(self) -> int:
        """Give the most tokens a prompt and its answer may have together."""
        return self._max_context

    @property
    def is_prefilling(self) -> bool:
        """Tell whether a row still has prompt to read."""
        return not self._prefill.is_empty

    @property
    def is_decoding(self) -> bool:
        """Tell whether a row is running."""
        return self._running is not None

    @property
    def rows(self) -> int:
        """Count the rows inside, reading or running. Safe on any thread."""
        running = self._running
        return len(self._prefill) + (0 if running is None else len(running.rows))

    def plan(self, job: GenerateJob) -> list[RowJob]:
        """Render, encode and measure: one row a choice. Safe on any thread."""
        return planned(job, self._chat, self._structured, self._max_context, self._vocab_size)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Make a grammar ready for rows; slow, and safe on any thread.

        Raises BadRequest naming the keyword or place that cannot be compiled.
        """
        return self._structured.compile(grammar)

    def join(self, job: RowJob) -> int:
        """Queue a row for prefill and give its id."""
        self._last_id += 1
        self._prefill.add(
            Row(
                self._last_id,
                job,
                Sampler(job.sampling, self._vocab_size),
                self._chat.speech(job),
                self._chat.eos_ids,
                self._chat.think_ids,
            )
        )
        return self._last_id

    def leave(self, row_id: int) -> None:
        """Drop a row, wherever it is; an unknown id is fine."""
        self._prefill.drop(row_id)
        if self._running is not None:
            self._keep([i for i, row in enumerate(self._running.rows) if row.id != row_id])

    def curtail(self, row_id: int, max_tokens: int) -> None:
        """Let a running row say no more than so many tokens; an unknown id is fine."""
        for row in self._running.rows if self._running is not None else []:
            if row.id == row_id:
                row.curtail(max_tokens)

    def forget(self) -> None:
        """Let go of what is kept of prompts."""
        self._prefixes.clear()
        mx.clear_cache()

    @property
    def kept_bytes(self) -> int:
        """Count the bytes kept of prompts that others may begin with."""
        return self._prefixes.nbytes

    def prefill(self, token_budget: int) -> list[RowDelta]:
        """Read one chunk of the prompts whose turn it is; those read whole start to run."""
        if (cohort := self._prefill.turn(token_budget)) is None:
            return []
        begun, there = cohort.read, sum(cohort.positions)
        try:
            self._prefill.read(cohort, token_budget)
            rows = len(cohort.rows)
            tokens = sum(cohort.positions) - there
            self.last_pass = Pass(rows, tokens, rows * (cohort.read - begun))
            return self._start(cohort) if cohort.is_read else []
        except Exception as error:
            return self._blame(cohort.rows, error)

    def decode(self) -> list[RowDelta]:
        """Take the tokens of the step under way, launch the next, then tell the texts.

        The next pass needs no token here: it is launched before they are read, so that the
        device never waits for Python. What a row said last, it is run on in vain at most once.
        """
        if (running := self._running) is None:
            return []
        try:
            logits = None
            if running.may_go_on:
                logits = self._passed(running.tokens, running.cache)
            said = running.read()
        except Exception as error:
            self._running = None
            return self._blame(running.rows, error)
        ends = [each.row.say(each.token) if each.is_finite else None for each in said]
        on = [i for i, each in enumerate(said) if each.is_finite and ends[i] is None]
        self.last_pass = Pass(len(said), len(said), len(said))
        fault = None
        try:
            self._remember(running, [i for i, end in enumerate(ends) if end is not None])
            self._keep(on)
            if logits is not None and 0 < len(on) < len(said):
                logits = logits[mx.array(on)]
            if on:
                self._step(logits)
        except Exception as error:
            self._running, fault = None, error
        deltas = [delta for each, end in zip(said, ends, strict=True) for delta in each.told(end)]
        if fault is not None:
            return deltas + self._blame([said[i].row for i in on if not said[i].row.is_over], fault)
        if self._running is not None:
            self._keep([i for i, row in enumerate(self._running.rows) if not row.is_over])
        return deltas

    def settle(self) -> None:
        """Wait until the device has done the step under way. What fails, fails when it is read."""
        if self._running is not None:
            with suppress(Exception):
                mx.eval(self._running.tokens, self._running.finite)

    def nbytes(self) -> int:
        """Count the bytes held on the device: weights, KV and prefixes."""
        weights = sum(array.nbytes for array in parameters(self._model))
        running = self._running.cache if self._running is not None else []
        kv = self._prefill.nbytes + sum(int(layer.nbytes) for layer in running)
        return weights + kv + self._prefixes.nbytes

    def close(self) -> None:
        """Let go of every array."""
        self._prefill.close()
        self._prefixes.clear()
        self._running = self._model = None
        mx.clear_cache()

    def _start(self, cohort: Cohort) -> list[RowDelta]:
        """Run the last prompt token of each row; a row that may say one token ends here."""
        inputs = mx.array([row.context[-1] for row in cohort.rows])
        cache = cohort.batch.prompt_cache
        started = self._chosen(cohort.rows, cache, self._passed(inputs, cache))
        last = [row.is_at_last for row in cohort.rows]
        deltas: list[RowDelta] = []
        if any(last) or cohort.rows[0].is_suspect:
            for each, is_last in zip(started.read(), last, strict=True):
                each.row.is_suspect = False
                if is_last:
                    deltas += each.told(each.row.say(each.token) if each.is_finite else None)
        if all(last):
            return deltas
        if any(last):
            started.keep([i for i, is_last in enumerate(last) if not is_last])
        if self._running is None:
            self._running = started
        else:
            self._running.extend(started)
        return deltas

    def _step(self, logits: mx.array | None) -> None:
        """Choose the next tokens from the pass that has read the last, launched by now or here."""
        if (running := self._running) is None:
            return
        if logits is None:
            logits = self._passed(running.tokens, running.cache)
        self._running = self._chosen(running.rows, running.cache, logits)
        self._steps += 1
        if self._steps % STEPS_PER_CLEAR == 0:
            mx.clear_cache()

    def _passed(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Launch the pass that reads tokens, (rows,); give its logits, (rows, vocabulary)."""
        logits: mx.array = self._model(tokens[:, None], cache=cache)[:, -1, :]
        _launch(logits)
        return logits

    def _chosen(self, rows: list[Row], cache: list[Any], logits: mx.array) -> Running:
        """Launch the choice of the next tokens, whose masks are made while the pass runs."""
        samplers = [row.sampler for row in rows]
        finite = is_finite(logits)
        logits = adjusted(samplers, logits)
        if bound := [i for i, row in enumerate(rows) if row.matcher is not None]:
            logits = self._structured.masked(logits, rows, bound)
        tokens = choose(samplers, logits, [len(row.tokens) for row in rows])
        scores = []
        if wanted := [i for i, row in enumerate(rows) if row.job.logprobs is not None]:
            k = max(rows[i].job.logprobs or 0 for i in wanted)
            some = score(logits, tokens, wanted, k)
            scores.append((some, [rows[i] for i in wanted]))
            _launch(some.chosen, some.ids, some.logprobs)
        _launch(tokens, finite)
        return Running(rows, cache, tokens, finite, scores)

    def _remember(self, running: Running, ended: list[int]) -> None:
        """Keep what rows have read and said: a conversation's next prompt begins with it."""
        if not self._prefixes.needs_block_ends:  # few answers end with one
            for i in ended:
                self._prefixes.store(running.rows[i].context[:-1], running.cache, i)

    def _keep(self, indices: list[int]) -> None:
        if self._running is None or len(indices) == len(self._running.rows):
            return
        if indices:
            self._running.keep(indices)
        else:
            self._running = None

    def _blame(self, rows: list[Row], error: Exception) -> list[RowDelta]:
        """Read every row again, alone; end the one that was alone already.

        Whatever is kept of prompts goes too: it may be what broke them.
        """
        self._prefixes.clear()
        if len(rows) == 1 and rows[0].is_suspect:
            return [RowDelta(rows[0].id, error=f"{type(error).__name__}: {error}")]
        for row in rows:
            row.suspect()
        self._prefill.readmit(rows)
        return []
