"""Prefill: the queue of prompts to read, and the choice of the next passes."""

import math
import time
from collections import abc, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import mul
from typing import Any, Final

import mlx.core as mx
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache

from gateway.engine.device import confirm
from gateway.engine.generation.prompt_scoring import Scorer
from gateway.engine.generation.sequence import Sequence
from gateway.engine.kv.layers import make_batch_caches
from gateway.engine.kv.prefix_cache import BLOCK, PrefixCache, count_shared
from gateway.engine.models.decoders import LayerGroups
from gateway.engine.models.rotations import sharing_rotations
from gateway.engine.vision.features import Images
from gateway.engine.vision.sight import Sight
from gateway.jobs.steps import Pass

# A prompt's last tokens join the chunk before them if they are at most 1/REST_SHARE of a chunk: a
# short pass takes nearly as long as a full one.
REST_SHARE: Final = 4
# The most tokens that a template adds to open an answer. The conversation's next prompt may lack
# them, because Qwen3's template drops earlier thoughts.
OPENING: Final = 16


def cut_prompt(start: int, end: int, *branches: int, images: Images | None = None) -> list[int]:
    """Return the sizes of the pieces in which the tokens from `start` to `end` are read.

    States are cached after each piece, so pieces end where another prompt may continue: at the
    `branches`, at the last block end, and at the last block end before the answer's opening.
    """
    stops = {*branches, (end - OPENING) // BLOCK * BLOCK, end // BLOCK * BLOCK}
    stops = {cut_outside(images, stop) for stop in stops}
    ends = [start, *sorted(stop for stop in stops if start < stop < end), end]
    return [after - before for before, after in pairwise(ends)]


def cut_outside(images: Images | None, place: int) -> int:
    """Return the last block end up to `place` that lies in no image to be read as a whole."""
    while images is not None and images.cut_around(place)[0] < place:
        place = images.cut_around(place)[0] // BLOCK * BLOCK
    return place


def size_chunk(images: Images | None, position: int, size: int) -> int:
    """Return a chunk's size, changed so that no image to be read as a whole is cut."""
    if images is None:
        return size
    before, after = images.cut_around(position + size)
    return (before if before > position else after) - position


def plan_passes(prompts: abc.Sequence[abc.Sequence[int]]) -> list[list[int]]:
    """Return how many tokens each pass reads of each prompt, given the sizes of their pieces.

    The prompt with the most pieces must come first; prompts with fewer pieces join later.
    """
    passes = max(map(len, prompts))
    return [[pieces[-n] for pieces in prompts if len(pieces) >= n] for n in range(passes, 0, -1)]


def take_prompts(prompts: Iterable[abc.Sequence[int]], budget: int) -> int:
    """Return how many of the first prompts, given as piece sizes, fit the budget; at least 1."""
    # A padded pass costs its longest piece times its rows.
    rows: list[int] = []  # the rows of each pass, the last pass first
    widest: list[int] = []
    count = 0
    for pieces in prompts:
        rows += [0] * (len(pieces) - len(rows))
        widest += [0] * (len(pieces) - len(widest))
        for i, size in enumerate(reversed(pieces)):
            rows[i] += 1
            widest[i] = max(widest[i], size)
        if count and sum(map(mul, rows, widest)) > budget:
            return count
        count += 1
    return count


def _padding(lengths: abc.Sequence[int]) -> int:
    return len(lengths) * max(lengths) - sum(lengths)


@dataclass(slots=True, eq=False)
class Alone:
    """A reader of one prompt, for caches that cannot be batched."""

    model: Any
    prompt_cache: list[Any]

    def prompt(self, prompts: list[list[int]]) -> None:
        self.model(mx.array(prompts), cache=self.prompt_cache)
        mx.eval([layer.state for layer in self.prompt_cache])


@dataclass(slots=True, eq=False)
class PrefillBatch:
    """Sequences whose prompts are read together, or one whose prompt is read in chunks."""

    seqs: list[Sequence]
    lm_batch: PromptProcessingBatch | Alone
    prompts: list[list[int]]  # the tokens to read: no cached ones, and not the context's last one
    pieces: list[list[int]]
    starts: list[int]  # the number of cached tokens before each prompt
    later: deque[PromptProcessingBatch | Alone]  # batches that join in later passes
    sight: Sight | None = None
    encoding: Iterator[None] | None = None  # encodes images, a part of a layer per `next`
    read: list[int] = field(init=False)  # the number of tokens read of each prompt

    def __post_init__(self) -> None:
        self.read = [0] * len(self.seqs)

    @property
    def is_read(self) -> bool:
        return self.read == [len(prompt) for prompt in self.prompts]

    @property
    def positions(self) -> list[int]:
        """Count each sequence's tokens in KV."""
        return [start + read for start, read in zip(self.starts, self.read, strict=True)]

    def read_on(self, sizes: abc.Sequence[int]) -> None:
        batch: Any = self.lm_batch
        if self.later and len(sizes) > len(batch):
            batch.extend(self.later.popleft())
        reading = zip(self.prompts, self.read, sizes, strict=False)
        tokens = [prompt[at : at + size] for prompt, at, size in reading]
        if self.sight is not None:
            tokens = [self.sight.tokens(ids) for ids in tokens]
            batch.model.begin(self.positions[: len(sizes)])
        batch.prompt(tokens)
        for i, size in enumerate(sizes):
            self.read[i] += size


class Prefill:
    """The queue of sequences and batches whose prompts are not fully read."""

    def __init__(
        self,
        model: Any,
        prefixes: PrefixCache,
        max_scored: int,
        applied: Callable[[abc.Sequence[int]], AbstractContextManager[None]],
        pass_s: float | None = None,
        sight: Sight | None = None,
    ) -> None:
        self._model = model
        self._sight = sight
        self._pass_s = math.inf if pass_s is None else pass_s
        self._prefixes = prefixes
        self._max_scored = max_scored  # the most tokens of a pass that computes prompt logprobs
        self._applied = applied  # returns a context manager that applies the rows' adapters
        self._groups = LayerGroups(pass_s)
        self._line: deque[Sequence | PrefillBatch] = deque()
        self._has_judged = False  # True if the last chunk was of label steps
        self.is_batched = True
        self.is_plain = False  # True if mlx-lm's caches for one sequence are used

    def __len__(self) -> int:
        return len(self._line)

    @property
    def nbytes(self) -> int:
        layers = [layer for batch in self._batches() for layer in batch.lm_batch.prompt_cache]
        return sum(int(layer.nbytes) for layer in layers)

    def add(self, seq: Sequence) -> None:
        self._line.append(seq)

    def readmit(self, seqs: abc.Sequence[Sequence]) -> None:
        """Put sequences that were already running at the front of the queue."""
        self._line.extendleft(reversed(seqs))

    @property
    def seqs(self) -> list[Sequence]:
        seqs: list[Sequence] = []
        for entry in self._line:
            seqs += _rows(entry)
        return seqs

    def forget(self, seqs: abc.Sequence[Sequence]) -> None:
        """Drop cached KV and image features, which may have caused these sequences' error."""
        self._prefixes.clear()
        if self._sight is not None:
            self._sight.clear(seqs)

    def hold(self, sequence_id: int, is_held: bool) -> None:
        """Set whether a sequence is parked once its prompt is read."""
        for seq in self.seqs:
            if seq.id == sequence_id:
                seq.is_held = is_held

    def drop(self, sequence_id: int) -> None:
        """Drop a sequence, and queue the others of its batch, which have read nothing yet."""
        line: deque[Sequence | PrefillBatch] = deque()
        for entry in self._line:
            staying = [seq for seq in _rows(entry) if seq.id != sequence_id]
            line.extend([entry] if len(staying) == len(_rows(entry)) else staying)
        self._line = line

    def close(self) -> None:
        self._line.clear()
        self._model = None

    def next_batch(self, budget: int) -> PrefillBatch | None:
        """Take the next batch out of the queue; return None if there is none to read now."""
        entries = list(self._line)
        # Label steps may be many, so after a chunk of label steps other sequences go first.
        if self._has_judged:
            entries.sort(key=_judges)
        for first in entries:
            self._line.remove(first)
            self._has_judged = _judges(first)
            if isinstance(first, PrefillBatch):
                return first
            budget = self._bound_budget(first, budget)
            known = self._count_known(first)
            # If a prompt with the same prefix is being read, this sequence waits for the prefix.
            if not self._gains_by_waiting(first, known, self._being_read()):
                return self._form_batch(self._choose_companions(first, known, budget), budget)
            self._line.append(first)
        return None

    def read(self, batch: PrefillBatch, budget: int, encoding_s: float = math.inf) -> Pass:
        """Read several prompts, or a chunk of a single one.

        Images are encoded first, for up to `encoding_s` seconds.
        """
        encoding, recalled = None, 0
        if batch.sight is not None and batch.encoding is not None and not batch.is_read:
            encoding = self._encode(batch, batch.sight, batch.encoding, encoding_s)
            recalled = encoding.recalled
        if encoding is not None and (encoding.encoded or batch.encoding is not None):
            self._line.append(batch)
            return encoding
        begun, padded = sum(batch.positions), 0
        for sizes in self._plan(batch, budget):
            adapters = [seq.adapter for seq in batch.seqs[: len(sizes)]]
            with self._applied(adapters), self._groups.applied(self._model), sharing_rotations():
                batch.read_on(sizes)
            self._store(batch, len(sizes))
            padded += len(sizes) * max(sizes)
        confirm()
        if not batch.is_read:
            self._line.append(batch)
        for seq in batch.seqs if batch.is_read else ():
            if seq.images is not None:
                seq.images.features.clear()
        return Pass(len(batch.seqs), sum(batch.positions) - begun, padded, recalled=recalled)

    def _encode(
        self, batch: PrefillBatch, sight: Sight, encoding: Iterator[None], seconds: float
    ) -> Pass:
        started, before = time.perf_counter(), (sight.encoded, sight.recalled)
        now, longest = started, 0.0  # seconds of the longest step
        for _ in encoding:
            longest, now = max(longest, time.perf_counter() - now), time.perf_counter()
            if now - started + longest > min(seconds, self._pass_s):
                break
        else:
            batch.encoding = None
        done = sight.encoded - before[0], sight.recalled - before[1]
        return Pass(len(batch.seqs), is_encoding=True, encoded=done[0], recalled=done[1])

    def _plan(self, batch: PrefillBatch, budget: int) -> list[list[int]]:
        if len(batch.seqs) > 1:
            return plan_passes(batch.pieces)
        size = self._chunk_size(batch, self._bound_budget(batch.seqs[0], budget))
        if not size:
            return []
        return [[size]]

    def _store(self, batch: PrefillBatch, count: int) -> None:
        for i, (seq, position) in enumerate(zip(batch.seqs[:count], batch.positions, strict=False)):
            cache, keys = batch.lm_batch.prompt_cache, seq.params.routing_keys
            seq.kept_tokens += self._prefixes.store(
                seq.context[:position], cache, i, keys, seq.root
            )
            if position == len(seq.context) - 1 and self._prefixes.is_on and not seq.scores_prompt:
                unkept = position // BLOCK * BLOCK - self._prefixes.count_known(
                    seq.context[:-1], seq.root
                )
                # Up to two blocks don't count: states may be cached that far before the end.
                seq.unkept_tokens = unkept if unkept > 2 * BLOCK else 0

    def _batches(self) -> list[PrefillBatch]:
        return [entry for entry in self._line if isinstance(entry, PrefillBatch)]

    def _being_read(self) -> list[tuple[Sequence, int]]:
        """List the sequences in batches, each with its number of tokens in KV."""
        return [
            (seq, position)
            for batch in self._batches()
            for seq, position in zip(batch.seqs, batch.positions, strict=True)
        ]

    def _bound_budget(self, seq: Sequence, budget: int) -> int:
        if seq.scores_prompt:
            return min(budget, self._max_scored)
        return budget

    def _count_known(self, seq: Sequence) -> int:
        """Count the prompt's first tokens that are cached; 0 if its logprobs are requested."""
        if seq.scores_prompt:
            return 0
        return len(self._find_known(seq))

    def _find_known(self, seq: Sequence) -> abc.Sequence[int]:
        """Return the prompt's first tokens that are cached and may be read on from."""
        tokens = seq.context[:-1]
        while True:
            known = self._prefixes.count_known(tokens, seq.root)
            tokens = tokens[: cut_outside(seq.images, known)]
            if len(tokens) == known:
                return tokens

    def _gains_by_waiting(
        self, seq: Sequence, known: int, others: Iterable[tuple[Sequence, int]]
    ) -> bool:
        """Return True if one of `others` will cache more than `known` tokens of this prompt."""
        return any(
            self._count_common(seq, other) > max(known, position) for other, position in others
        )

    def _count_common(self, seq: Sequence, other: Sequence) -> int:
        """Count the first tokens whose KV a sequence can take once another has read them."""
        is_whole = seq.is_suspect or seq.scores_prompt
        if is_whole or other.root != seq.root or not self._prefixes.is_on:
            return 0
        return cut_outside(seq.images, count_shared(seq.context[:-1], other.context[:-1]))

    def _awaited(self, seq: Sequence, position: int) -> Iterator[int]:
        """Yield the later positions up to which queued sequences wait for this sequence's KV."""
        at = slice(position // BLOCK * BLOCK, position // BLOCK * BLOCK + BLOCK)
        ahead = seq.context[at]  # a quick test: most contexts differ in this block already
        for other in self._line:
            if isinstance(other, Sequence) and other is not seq and other.context[at] == ahead:
                common = self._count_common(other, seq)
                if common > position and common > self._count_known(other):
                    yield common

    def _is_alone(self, seq: Sequence, rest: int) -> bool:
        # mlx-lm cannot pad an empty row, and a Scorer's rows cannot stop at their block ends.
        is_stopping = self._prefixes.needs_block_ends and seq.scores_prompt and rest >= BLOCK
        return not self.is_batched or seq.is_suspect or rest == 0 or is_stopping

    def _cut(self, seq: Sequence, known: int) -> list[int]:
        end = len(seq.context) - 1
        if not self._prefixes.needs_block_ends or seq.scores_prompt:
            return [end - known]
        branch = self._prefixes.count_kept(seq.context[:-1], seq.root)
        awaited = min(self._awaited(seq, known), default=branch)
        return cut_prompt(known, end, branch, awaited, images=seq.images)

    def _choose_companions(self, first: Sequence, known: int, budget: int) -> list[Sequence]:
        """Return the first sequence and those to read with it, taken out of the queue."""
        seqs, pieces = [first], [self._cut(first, known)]
        if self._is_alone(first, sum(pieces[0])):
            return seqs
        if self._prefixes.needs_block_ends and any(self._awaited(first, known)):
            return seqs  # read alone, it can stop where the waiting sequences branch off
        reading = [*self._being_read(), (first, known)]
        lengths = [len(first.context)]
        for seq in [entry for entry in self._line if isinstance(entry, Sequence)]:
            known = self._count_known(seq)
            rest = len(seq.context) - 1 - known
            if self._is_alone(seq, rest) or self._gains_by_waiting(seq, known, reading):
                continue
            if not _alike(seq, first):
                continue
            cut = self._cut(seq, known)
            if take_prompts([*pieces, cut], budget) == len(seqs):
                break
            if _padding([*lengths, len(seq.context)]) > budget:
                # The KV of shorter rows is padded too, so whole lengths count.
                continue
            seqs.append(seq)
            pieces.append(cut)
            lengths.append(len(seq.context))
            reading.append((seq, known))
            self._line.remove(seq)
        return seqs

    def _take_known(self, seq: Sequence) -> list[Any]:
        """Return caches to read a prompt into, and count their tokens in `seq.cached_tokens`."""
        # A suspect's whole prompt is read, because cached KV may have caused its fault.
        is_whole = seq.is_suspect or seq.scores_prompt
        seq.cached_tokens, caches = 0, None
        if not is_whole:
            seq.cached_tokens, caches = self._prefixes.take(self._find_known(seq), seq.root)
        if caches:
            return caches
        if self.is_plain:
            return make_prompt_cache(self._model)
        return make_batch_caches(self._model)

    def _form_batch(self, seqs: list[Sequence], budget: int) -> PrefillBatch:
        read = [(seq, self._take_known(seq), self._cut(seq, seq.cached_tokens)) for seq in seqs]
        read.sort(key=lambda entry: len(entry[2]), reverse=True)
        seqs = [seq for seq, _, _ in read]
        model = self._model
        has_images = any(seq.images is not None for seq in seqs)
        sight = self._sight if has_images else None
        if seqs[0].scores_prompt:
            model = Scorer(model, seqs)
        elif sight is not None:
            model = sight.reader(seqs)
        lm_batches = deque(
            self._open([(seq, caches) for seq, caches, _ in group], model, budget)
            for _, group in groupby(read, key=lambda entry: len(entry[2]))
        )
        return PrefillBatch(
            seqs,
            lm_batches.popleft(),
            [seq.context[seq.cached_tokens : -1] for seq in seqs],
            [pieces for _, _, pieces in read],
            [seq.cached_tokens for seq in seqs],
            lm_batches,
            sight,
            None if sight is None else sight.encode([(s.images, s.cached_tokens) for s in seqs]),
        )

    def _open(
        self, seqs: abc.Sequence[tuple[Sequence, list[Any]]], model: Any, budget: int
    ) -> PromptProcessingBatch | Alone:
        if self.is_plain:
            return Alone(model, seqs[0][1])
        ids, caches = [seq.id for seq, _ in seqs], [layers for _, layers in seqs]
        # mlx-lm would cut a chunk that has grown to an image's end.
        wholes = [seq.images.wholes for seq, _ in seqs if seq.images is not None]
        step = max(budget, 1, *(len(seq.context) for seq, _ in seqs if any(wholes)))
        return PromptProcessingBatch(model, ids, caches, prefill_step_size=step)

    def _chunk_size(self, batch: PrefillBatch, budget: int) -> int:
        """Return how many tokens of a single prompt to read now."""
        seq, position = batch.seqs[0], batch.positions[0]
        rest = len(batch.prompts[0]) - batch.read[0]
        size = min(max(1, budget), rest)
        # A scored prompt's chunk must not grow, because its logits have a memory limit.
        if rest - size <= budget // REST_SHARE and not seq.scores_prompt:
            size = rest
        aligned = cut_outside(seq.images, (position + size) // BLOCK * BLOCK)
        if not self._prefixes.needs_block_ends or aligned <= position:
            return size_chunk(seq.images, position, size)
        stop = position + self._cut(seq, position)[0]
        return min(aligned, stop, *self._awaited(seq, position)) - position


def _rows(entry: Sequence | PrefillBatch) -> list[Sequence]:
    if isinstance(entry, PrefillBatch):
        return entry.seqs
    return [entry]


def _judges(entry: Sequence | PrefillBatch) -> bool:
    return _rows(entry)[0].params.step is not None


def _alike(one: Sequence, other: Sequence) -> bool:
    ends = [(seq.params.max_tokens == 0, seq.params.step is None) for seq in (one, other)]
    return one.scores_prompt == other.scores_prompt and ends[0] == ends[1]
