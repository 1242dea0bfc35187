"""The memory of a model's KV, reserved before it is allocated: sequences that do not fit wait.

A sequence reserves its present tokens, not the most it may reach: it joins with room for an answer
of usual length and grows while there is memory; if there is none, the youngest one is preempted.
"""

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from gateway.errors import PromptTooLarge
from gateway.jobs.steps import KvCost, SequenceParams
from gateway.serving.budget import Budget, PrefixShare

KV_STEP = 256  # tokens by which KV caches grow: they may hold as many unused ones
SPARE_ROWS = 8  # rows of a batch for each spare row that its KV may have
GROWTH = 256  # tokens by which a sequence's reservation grows while memory is free
MARGIN = 32  # tokens: more than a turn's steps and the pass launched ahead of its last
PREFIX_ROW = 32 * 1024  # tokens: a sequence up to this length has room beside kept prompts
LONGEST = 1 << 24  # tokens, beyond every model's context


@dataclass(frozen=True, slots=True)
class RowCosts:
    """The bytes that sequences cost."""

    kv: KvCost = field(default_factory=KvCost)
    included: int = 0  # bytes of their KV in the model's own share
    # Returns the bytes available if all other models that may be evicted were.
    most: Callable[[], int] = lambda: 0
    largest: int | None = None  # most bytes of one buffer, if bounded
    answer_tokens: int = 256  # tokens of an answer that a joining sequence has room for
    chunk_tokens: int = 0  # most tokens of a chunk: prompts are read in chunks
    max_context: int = LONGEST
    image_token: int = 0  # bytes of a token of an image, beside its KV


@dataclass(frozen=True, slots=True)
class Layout:
    """How sequences of these lengths, in tokens, are laid out in memory."""

    # Sequences that decode, or will after prefill. Their KV is a rectangle, their number times the
    # longest (measured: one long sequence among seven short ones takes 14 times the memory).
    batched: Sequence[int] = ()
    # Sequences with caches of their own: parked ones, and those that answer with one token.
    single: Sequence[int] = ()
    image_tokens: int = 0  # tokens of images in all of them

    def __bool__(self) -> bool:
        return bool(self.batched or self.single)

    def nbytes(self, costs: RowCosts) -> int:
        if not self:
            return 0
        # Prefill pads sequences by a chunk at most, and makes sliding windows hold a chunk more
        # than their size.
        kv, chunk = costs.kv, costs.chunk_tokens
        longest = max(self.batched, default=0)
        slots = len(self.batched) + len(self.batched) // SPARE_ROWS
        rectangle = slots * kv.of(longest + KV_STEP, chunk) if longest else 0
        # A draft model has KV for few sequences, which may be any: also one with a single token
        # left.
        drafted = min(kv.draft.rows, slots + len(self.single))
        drafts = kv.draft.token * (drafted * (max(longest, *self.single, 0) + KV_STEP) + chunk)
        single = sum(kv.of(length + KV_STEP, chunk) for length in self.single)
        images = costs.image_token * self.image_tokens
        return rectangle + drafts + drafted * kv.draft.states + single + kv.of(chunk) + images

    def has_buffers(self, costs: RowCosts) -> bool:
        """Return True if no buffer is larger than the device can have."""
        # The largest buffer has one layer's keys, or values, of all sequences that share a batch.
        if costs.largest is None:
            return True
        slots = len(self.batched) + len(self.batched) // SPARE_ROWS
        unused = KV_STEP + costs.chunk_tokens
        rectangle = slots * (max(self.batched, default=0) + unused)
        single = max(self.single, default=0) + unused
        return max(rectangle, single) * costs.kv.plane <= costs.largest


def longest_chunk(chunk_tokens: int) -> int:
    """Return the most tokens of a chunk."""
    # The end of a prompt, if at most a quarter of a chunk, is read with the chunk before it.
    return chunk_tokens + chunk_tokens // 4


class RowMemory:
    """The share of the budget that one model's sequences have."""

    def __init__(
        self, budget: Budget, costs: RowCosts, prefixes: PrefixShare | None = None
    ) -> None:
        self._budget = budget
        self._costs = costs
        self._share = budget.share()
        # Kept prompts are freed when sequences or models need memory.
        self.prefixes = prefixes or PrefixShare(budget, budget.limit_bytes)

    @property
    def must_shrink_prefixes(self) -> bool:
        """Return True if kept prompts take memory that others need."""
        return bool(self._costs.kv) and self.prefixes.excess_bytes > 0

    def note_prefixes(self, nbytes: int) -> None:
        """Note the bytes of kept prompts."""
        if self._costs.kv:
            self.prefixes.note(nbytes)

    def limit_prefixes(self) -> int | None:
        """Limit the bytes kept of prompts for the next step; return the limit, or None if bytes are
        not counted.
        """
        if not self._costs.kv:
            return None
        row_bytes = Layout([min(self._costs.max_context, PREFIX_ROW)]).nbytes(self._costs)
        allowed = self.prefixes.allowed(max(0, row_bytes - self._costs.included))
        self.prefixes.shrink_to(allowed)
        return allowed

    def adopt(self, chunk_tokens: int) -> None:
        """Apply a new size of chunks."""
        self._costs = replace(self._costs, chunk_tokens=chunk_tokens)

    def check(self, model: str, params: SequenceParams) -> None:
        """Raise PromptTooLarge for a prompt that, alone, leaves no room for one token."""
        longest = self.longest
        # `max_tokens` does not count: few answers are as long.
        if longest <= len(params.prompt):
            raise PromptTooLarge(model, len(params.prompt), max(0, longest - 1))

    @property
    def longest(self) -> int:
        """Return the most tokens, prompt and answer, that a sequence could ever have."""
        if not self._costs.kv:
            return LONGEST
        available = max(self._costs.most(), self._costs.included)

        def exceeds(length: int) -> bool:
            layout = Layout([length])
            return layout.nbytes(self._costs) > available or not layout.has_buffers(self._costs)

        return bisect_left(range(1, LONGEST), True, key=exceeds)

    def grant_length(self, used: int, max_length: int, preemptions: int) -> int:
        """Return the length to reserve for a sequence that joins with `used` of `max_length`
        tokens.
        """
        # Each preemption doubles the room for its answer, so that it is not preempted often.
        usual = used + (self._costs.answer_tokens << preemptions)
        return min(max_length, max(used + 1, min(usual, self.longest)))

    def fits(self, layout: Layout, *, has_grown: bool = False) -> bool:
        """Return True if there is memory for the model's sequences, laid out like this, once kept
        prompts are freed.
        """
        available = self._budget.spare_bytes
        if has_grown:
            # Running sequences may take bytes that a model waits for, and those of prompts in other
            # pools, which are freed in the next turns there. New sequences wait for both.
            available = self._budget.free_bytes + self._budget.kept_besides(self.prefixes)
        has_bytes = self._missing_bytes(layout, available) <= 0
        return has_bytes and layout.has_buffers(self._costs)

    def hold(self, layout: Layout) -> None:
        """Reserve the bytes of these sequences."""
        if self._costs.kv:
            self._share.resize(max(0, layout.nbytes(self._costs) - self._costs.included))

    def make_room(self, layout: Layout, *, is_pressing: bool) -> None:
        """Free prompts kept in other pools or, if there are none, evict idle models if these
        sequences fit then. It is pressing if no sequence runs whose end would free memory.
        """
        # No model is evicted for sequences while a model waits for bytes.
        free = self._budget.free_bytes
        missing = self._missing_bytes(layout, free)
        if self._budget.claimed_bytes or missing <= 0:
            return
        if not self._budget.recall(missing, besides=self.prefixes):
            self._budget.evict_idle(missing + max(0, free), is_pressing=is_pressing)

    @contextlib.contextmanager
    def watch(self, on_change: Callable[[], None]) -> Iterator[None]:
        """While entered, call `on_change` whenever there may be bytes for waiting sequences, and
        when kept prompts have to go.
        """
        self._budget.listen(on_change)
        try:
            yield
        finally:
            self._budget.unlisten(on_change)

    def release(self) -> None:
        """Release all bytes."""
        self._share.release()

    def _missing_bytes(self, layout: Layout, available: int) -> int:
        """Return the bytes that the model's sequences, laid out like this, need beyond `available`
        and the prompts kept in the model's pool.
        """
        if not self._costs.kv:
            return 0
        needed = layout.nbytes(self._costs) - self._costs.included
        return needed - self._share.nbytes - max(0, available + self.prefixes.nbytes)
