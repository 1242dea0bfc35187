"""Prefill: which prompts are read together, and which of them the next chunk is for."""

from collections import abc, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache

from gateway.engine.generation.kv_cache import make_batch_caches
from gateway.engine.generation.prefix_cache import BLOCK, PrefixCache, count_shared
from gateway.engine.generation.scoring import Scorer
from gateway.engine.generation.sequence import Sequence

# The rest of a prompt is read with its last chunk if it is at most a chunk divided by this: a pass
# of a few tokens costs nearly as much as a whole one.
REST_SHARE: Final = 4
# More tokens than a template puts after the last message, to open the answer. They may be others
# in the conversation's next prompt: Qwen3's template drops what it thought before.
OPENING: Final = 16


def take_prompts(lengths: abc.Sequence[int], budget: int) -> int:
    """Count how many of the oldest prompts are read together.

    A padded chunk costs its longest row times its rows. The first prompt is always taken; one
    beyond the budget is read alone, in chunks.
    """
    longest = 0
    for rows, length in enumerate(lengths):
        longest = max(longest, length)
        if rows and longest * (rows + 1) > budget:
            return rows
    return len(lengths)


def _padding(lengths: abc.Sequence[int]) -> int:
    """Count the padding tokens that fill all rows up to the longest."""
    return len(lengths) * max(lengths) - sum(lengths)


@dataclass(slots=True, eq=False)
class Alone:
    """The prompt of one sequence, read into caches that cannot be batched."""

    model: Any
    prompt_cache: list[Any]

    def prompt(self, prompts: list[list[int]]) -> None:
        """Read the tokens of the only row."""
        self.model(mx.array(prompts), cache=self.prompt_cache)
        mx.eval([layer.state for layer in self.prompt_cache])


@dataclass(slots=True, eq=False)
class PrefillBatch:
    """Sequences that are read together. Several are read in one chunk; only a single one takes
    more.

    `prompts` are the tokens to read, all but the last of each context; `starts` counts the tokens
    that were in KV before; `read` counts the tokens of `prompts` that have been read.
    """

    rows: list[Sequence]
    lm_batch: PromptProcessingBatch | Alone
    prompts: list[list[int]]
    starts: list[int]
    read: int = 0

    @property
    def length(self) -> int:
        """Return the length of the longest prompt."""
        return max(len(prompt) for prompt in self.prompts)

    @property
    def is_read(self) -> bool:
        """Return True if nothing is left to read."""
        return self.read >= self.length

    @property
    def positions(self) -> list[int]:
        """Count the tokens of each sequence that are in KV."""
        return [
            start + min(self.read, len(prompt))
            for start, prompt in zip(self.starts, self.prompts, strict=True)
        ]


class Prefill:
    """The queue of sequences with prompt left to read, and of batches under way.

    A batch goes to the back after each chunk, so a newcomer waits for at most one chunk of each
    batch before it; of those that only judge, of which there may be many, for one in all. A
    sequence whose prompt begins like one that is being read waits until that much is read, and
    continues from there: what a burst of requests shares is read once.
    """

    def __init__(self, model: Any, prefixes: PrefixCache, most_scored: int) -> None:
        self._model = model
        self._prefixes = prefixes
        self._most_scored = most_scored  # tokens in one pass, if prompt logprobs are wanted
        self._line: deque[Sequence | PrefillBatch] = deque()
        self._has_judged = False  # the last chunk was of sequences that only judge
        self.is_batched = True  # sequences are read together
        self.is_plain = False  # use mlx-lm's caches for one sequence, not its batched ones

    def __len__(self) -> int:
        """Count the entries in the queue, without the batch being read right now."""
        return len(self._line)

    @property
    def is_empty(self) -> bool:
        return not self._line

    @property
    def nbytes(self) -> int:
        """Count the bytes of KV read so far."""
        layers = [layer for batch in self._batches() for layer in batch.lm_batch.prompt_cache]
        return sum(int(layer.nbytes) for layer in layers)

    def add(self, row: Sequence) -> None:
        self._line.append(row)

    def readmit(self, rows: abc.Sequence[Sequence]) -> None:
        """Queue sequences that were inside before, ahead of all others."""
        self._line.extendleft(reversed(rows))

    @property
    def rows(self) -> list[Sequence]:
        """List the sequences in the queue, those of batches under way included."""
        return [
            row
            for each in self._line
            for row in (each.rows if isinstance(each, PrefillBatch) else [each])
        ]

    def drop(self, sequence_id: int) -> None:
        self._line = deque(
            each
            for each in self._line
            if sequence_id != (each.rows[0].id if isinstance(each, PrefillBatch) else each.id)
        )

    def close(self) -> None:
        """Release every sequence and the model."""
        self._line.clear()
        self._model = None

    def next_batch(self, budget: int) -> PrefillBatch | None:
        """Take the next sequence out of the queue, with those that can be read along with it."""
        in_turn = sorted(self._line, key=_judges) if self._has_judged else list(self._line)
        for first in in_turn:
            self._line.remove(first)
            self._has_judged = _judges(first)
            if isinstance(first, PrefillBatch):
                return first
            budget = self._bound_budget(first, budget)
            known = self._count_known(first)
            if not self._gains_by_waiting(first, known, self._being_read()):
                return self._form_batch(self._choose_companions(first, known, budget), budget)
            self._line.append(first)
        return None

    def read(self, batch: PrefillBatch, budget: int) -> None:
        """Read a chunk; a batch with more to read joins the queue again."""
        end = self._chunk_end(batch, self._bound_budget(batch.rows[0], budget))
        if end > batch.read:
            batch.lm_batch.prompt([prompt[batch.read : end] for prompt in batch.prompts])
            batch.read = end
            for i, (row, position) in enumerate(zip(batch.rows, batch.positions, strict=True)):
                row.kept_tokens += self._prefixes.store(
                    row.context[:position],
                    batch.lm_batch.prompt_cache,
                    i,
                    row.job.beginning,
                    row.root,
                )
        if not batch.is_read:
            self._line.append(batch)

    def _batches(self) -> list[PrefillBatch]:
        return [each for each in self._line if isinstance(each, PrefillBatch)]

    def _being_read(self) -> list[tuple[Sequence, int]]:
        """List the sequences whose KV others may wait for, and how far each is read."""
        return [
            (row, position)
            for batch in self._batches()
            for row, position in zip(batch.rows, batch.positions, strict=True)
        ]

    def _bound_budget(self, row: Sequence, budget: int) -> int:
        """Return how many tokens to read in one pass with this sequence in it."""
        return min(budget, self._most_scored) if row.scores_prompt else budget

    def _count_known(self, row: Sequence) -> int:
        """Count the tokens that need not be read: none if the prompt is to be scored."""
        if row.scores_prompt:
            return 0
        return self._prefixes.count_known(row.context[:-1], row.root)

    def _gains_by_waiting(
        self, row: Sequence, known: int, others: Iterable[tuple[Sequence, int]]
    ) -> bool:
        """Return True if another sequence will soon have read more of this prompt than is known."""
        if row.is_suspect or row.scores_prompt or not self._prefixes.is_on:
            return False
        return any(
            count_shared(row.context[:-1], other.context[:-1]) > max(known, position)
            for other, position in others
            if other.root == row.root
        )

    def _is_alone(self, row: Sequence, rest: int) -> bool:
        """Return True if a sequence with so many tokens to read cannot share a batch."""
        # mlx-lm cannot pad a row that has nothing to read. Where a prefix is kept only as it is
        # at the end of a block, rows would have to end their blocks together.
        is_stopping = self._prefixes.needs_block_ends and rest >= BLOCK
        return not self.is_batched or row.is_suspect or rest == 0 or is_stopping

    def _choose_companions(self, first: Sequence, known: int, budget: int) -> list[Sequence]:
        """Choose the sequences to read along with the first, and take them out of the queue."""
        rows, rests = [first], [len(first.context) - 1 - known]
        if self._is_alone(first, rests[0]):
            return rows
        others = [*self._being_read(), (first, known)]
        lengths = [len(first.context)]
        for row in [each for each in self._line if isinstance(each, Sequence)]:
            known = self._count_known(row)
            rest = len(row.context) - 1 - known
            if self._is_alone(row, rest) or self._gains_by_waiting(row, known, others):
                continue
            if not _alike(row, first):
                continue
            if take_prompts([*rests, rest], budget) == len(rows):
                break
            if _padding([*lengths, len(row.context)]) > budget:
                continue  # what is in KV is padded too, and rows are counted by their own length
            rows.append(row)
            rests.append(rest)
            lengths.append(len(row.context))
            others.append((row, known))
            self._line.remove(row)
        return rows

    def _form_batch(self, rows: list[Sequence], budget: int) -> PrefillBatch:
        make_caches = make_prompt_cache if self.is_plain else make_batch_caches
        caches, prompts = [], []
        for row in rows:
            prompt = row.context[:-1]
            # A suspect reads its whole prompt: a kept prefix may be what broke it.
            is_whole = row.is_suspect or row.scores_prompt
            known, cache = (0, None) if is_whole else self._prefixes.take(prompt, row.root)
            row.cached_tokens = known
            caches.append(cache or make_caches(self._model))
            prompts.append(prompt[known:])
        model = Scorer(self._model, rows) if rows[0].scores_prompt else self._model
        lm_batch = (
            Alone(model, caches[0])
            if self.is_plain
            else PromptProcessingBatch(
                model, [row.id for row in rows], caches, prefill_step_size=max(budget, 1)
            )
        )
        return PrefillBatch(rows, lm_batch, prompts, [row.cached_tokens for row in rows])

    def _chunk_end(self, batch: PrefillBatch, budget: int) -> int:
        """Return how far to read now. Where prefixes are kept only at the end of a block, that is
        one: of the last that is sure to end before the answer's opening, too.
        """
        chunk = max(1, budget // len(batch.rows))
        end = min(batch.read + chunk, batch.length)
        is_scored = batch.rows[0].scores_prompt  # its logits have a bound that holds
        if batch.length - end <= chunk // REST_SHARE and not is_scored:
            end = batch.length
        if not self._prefixes.needs_block_ends or len(batch.rows) > 1:
            return end
        start = batch.starts[0]
        aligned = (start + end) // BLOCK * BLOCK - start
        before_opening = (start + batch.length - OPENING) // BLOCK * BLOCK - start
        if batch.read < before_opening < aligned:
            return before_opening
        return aligned if aligned > batch.read else end


def _judges(entry: Sequence | PrefillBatch) -> bool:
    row = entry.rows[0] if isinstance(entry, PrefillBatch) else entry
    return row.job.step is not None


def _alike(one: Sequence, other: Sequence) -> bool:
    """Return True if two sequences may share a batch: equally scored, to the same end."""
    ends = [(row.job.max_tokens == 0, row.job.step is None) for row in (one, other)]
    return one.scores_prompt == other.scores_prompt and ends[0] == ends[1]
