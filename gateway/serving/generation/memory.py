"""Reserves memory for a model's KV before it is allocated.

A sequence joins with memory for an answer of usual length, and reserves more as it grows. If there
is no memory, the youngest sequence is preempted.
"""

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from gateway.errors import PromptTooLarge
from gateway.jobs.steps import KvCost, SequenceParams
from gateway.serving.budget import Budget, PrefixShare

KV_STEP = 256
SPARE_ROWS = 8  # the KV of a batch has one spare row per this many rows
GROWTH = 256  # tokens by which a sequence's reservation grows while memory is free
MARGIN = 32  # tokens, more than a turn can decode
PREFIX_ROW = 32 * 1024  # tokens of a sequence for which prefix caches leave memory
LONGEST = 1 << 24
# Bytes per query and key of an attention mask that images open, with the causal mask below it:
# 1 to 2.1 as measured. A prompt of Gemma 3 4B has 20 KiB of KV per token beside 1.3 KiB of mask.
MASK_BYTES = 2


@dataclass(frozen=True, slots=True)
class RowCosts:
    """The sizes from which a sequence's bytes are computed, and their bounds."""

    kv: KvCost = field(default_factory=KvCost)
    included: int = 0  # bytes of KV that the weights' share includes
    # Returns the bytes that are available if all other evictable models are evicted.
    most: Callable[[], int] = lambda: 0
    largest: int | None = None  # bytes of the largest buffer on the device
    answer_tokens: int = 256  # tokens of an answer that a joining sequence reserves
    chunk_tokens: int = 0  # most tokens of a prefill chunk
    max_context: int = LONGEST
    image_token: int = 0  # bytes that an image's token takes besides its KV
    image_chunk: int = 0  # most tokens of an image that is read in one chunk
    image_window: int | None = None  # most keys in the layers whose masks images open; None: all


@dataclass(frozen=True, slots=True)
class Layout:
    """The lengths, in tokens, of the sequences that share one KV cache, and of all others."""

    # Sequences that decode share a KV cache, in which each takes as much as the longest one.
    batched: Sequence[int] = ()
    single: Sequence[int] = ()  # parked sequences, and those whose answer is one token
    image_tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.batched or self.single)

    def nbytes(self, costs: RowCosts) -> int:
        if not self:
            return 0
        # Prefill pads a sequence by up to a chunk, and a sliding window's cache has a chunk more.
        kv, chunk = costs.kv, costs.chunk_tokens
        longest = max(self.batched, default=0)
        slots = len(self.batched) + len(self.batched) // SPARE_ROWS
        rectangle = slots * kv.of(longest + KV_STEP, chunk) if longest else 0
        # The draft model has KV for up to `kv.draft.rows` sequences of both kinds.
        drafted = min(kv.draft.rows, slots + len(self.single))
        most = max(longest, *self.single, 0)
        drafts = kv.draft.token * (drafted * (most + KV_STEP) + chunk)
        single = sum(kv.of(length + KV_STEP, chunk) for length in self.single)
        images = costs.image_token * self.image_tokens
        if self.image_tokens and costs.image_chunk:
            keys = most if costs.image_window is None else min(most, costs.image_window)
            images += MASK_BYTES * chunk * (keys + chunk)
        return rectangle + drafts + drafted * kv.draft.states + single + kv.of(chunk) + images

    def has_buffers(self, costs: RowCosts) -> bool:
        """Return True if no buffer exceeds the device's bound."""
        # The largest buffer has one layer's keys, or values, for a whole batch.
        if costs.largest is None:
            return True
        slots = len(self.batched) + len(self.batched) // SPARE_ROWS
        unused = KV_STEP + costs.chunk_tokens
        rectangle = slots * (max(self.batched, default=0) + unused)
        single = max(self.single, default=0) + unused
        return max(rectangle, single) * costs.kv.plane <= costs.largest


def longest_chunk(chunk_tokens: int) -> int:
    # The rest of a prompt is added to the last chunk if it is at most a quarter of a chunk.
    return chunk_tokens + chunk_tokens // 4


class RowMemory:
    """The memory for the KV of one model's sequences."""

    def __init__(
        self, budget: Budget, costs: RowCosts, prefixes: PrefixShare | None = None
    ) -> None:
        self._budget = budget
        self._costs = costs
        self.adopt(costs.chunk_tokens)
        self._share = budget.share()
        self.prefixes = prefixes or PrefixShare(budget, budget.limit_bytes)

    @property
    def must_shrink_prefixes(self) -> bool:
        return bool(self._costs.kv) and self.prefixes.excess_bytes > 0

    def note_prefixes(self, nbytes: int) -> None:
        if self._costs.kv:
            self.prefixes.note(nbytes)

    def limit_prefixes(self) -> int | None:
        """Set and return the most bytes of the prefix pool; None if KV is not counted."""
        if not self._costs.kv:
            return None
        row_bytes = Layout([min(self._costs.max_context, PREFIX_ROW)]).nbytes(self._costs)
        allowed = self.prefixes.allowed(max(0, row_bytes - self._costs.included))
        self.prefixes.shrink_to(allowed)
        return allowed

    def adopt(self, chunk_tokens: int) -> None:
        longest = max(chunk_tokens, self._costs.image_chunk)
        self._costs = replace(self._costs, chunk_tokens=longest)

    def check(self, model: str, params: SequenceParams) -> None:
        """Raise PromptTooLarge if there can never be memory for the prompt and one token."""
        longest = self.longest
        # Few answers have `max_tokens`, so memory for these is not required.
        if longest <= len(params.prompt):
            raise PromptTooLarge(model, len(params.prompt), max(0, longest - 1))

    @property
    def longest(self) -> int:
        """Return the most tokens, of prompt and answer, for which there can ever be memory."""
        if not self._costs.kv:
            return LONGEST
        available = max(self._costs.most(), self._costs.included)

        def exceeds(length: int) -> bool:
            layout = Layout([length])
            return layout.nbytes(self._costs) > available or not layout.has_buffers(self._costs)

        return bisect_left(range(1, LONGEST), True, key=exceeds)

    def grant_length(self, used: int, max_length: int, preemptions: int) -> int:
        """Return the tokens to reserve for a joining sequence that has `used` tokens now."""
        # Each preemption doubles a sequence's room for the answer, so that preemptions get rare.
        usual = used + (self._costs.answer_tokens << preemptions)
        return min(max_length, max(used + 1, min(usual, self.longest)))

    def fits(self, layout: Layout, *, has_grown: bool = False) -> bool:
        """Return True if there is memory for the sequences once the model's prefix pool is freed.

        If `has_grown`, the sequences are running already.
        """
        available = self._budget.spare_bytes
        if has_grown:
            # Running sequences may also take claimed bytes, and the bytes of other prefix pools.
            available = self._budget.free_bytes + self._budget.kept_besides(self.prefixes)
        has_bytes = self._missing_bytes(layout, available) <= 0
        return has_bytes and layout.has_buffers(self._costs)

    def hold(self, layout: Layout) -> None:
        if self._costs.kv:
            self._share.resize(max(0, layout.nbytes(self._costs) - self._costs.included))

    def make_room(self, layout: Layout, *, is_pressing: bool) -> None:
        """Free the bytes that this layout lacks, from other prefix pools or else from idle models.

        If `is_pressing`, no sequence is running whose end would free memory.
        """
        # While a model waits for bytes, no other model is evicted for sequences.
        free = self._budget.free_bytes
        missing = self._missing_bytes(layout, free)
        if self._budget.claimed_bytes or missing <= 0:
            return
        if not self._budget.recall(missing, besides=self.prefixes):
            self._budget.evict_idle(missing + max(0, free), is_pressing=is_pressing)

    @contextlib.contextmanager
    def watch(self, on_change: Callable[[], None]) -> Iterator[None]:
        """While entered, call `on_change` when memory gets free or prefix pools must free some."""
        self._budget.listen(on_change)
        try:
            yield
        finally:
            self._budget.unlisten(on_change)

    def release(self) -> None:
        self._share.release()

    def _missing_bytes(self, layout: Layout, available: int) -> int:
        """Return the bytes that the layout needs beyond the reserved and available ones."""
        if not self._costs.kv:
            return 0
        needed = layout.nbytes(self._costs) - self._costs.included
        return needed - self._share.nbytes - max(0, available + self.prefixes.nbytes)
