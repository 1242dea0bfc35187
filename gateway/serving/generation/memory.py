"""The KV of a model's rows, counted before it is taken: what does not fit waits, and kills nobody.

Rows are counted by what they have, not by the most they may ask for: they join with room for a
usual answer, grow while there is memory, and when it ends the youngest gives its own back.
"""

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from gateway.errors import PromptTooLarge
from gateway.jobs import KvCost, SequenceParams
from gateway.serving.budget import Budget

KV_STEP = 256  # tokens by which mlx-lm's caches grow: they may hold so many more than are used
GROWTH = 256  # tokens by which a row's count grows, while that is free
MARGIN = 32  # tokens, more than one turn's steps and the pass that is launched ahead of the last
LONGEST = 1 << 24  # tokens, beyond every model's context


@dataclass(frozen=True, slots=True)
class RowCosts:
    """What rows cost in bytes: their KV, what the model's own share has for them already, and the
    most there could be if all that may leave had left.

    A row joins with room for `answer_tokens`. Prompts are read in chunks of `chunk_tokens`.
    """

    kv: KvCost = field(default_factory=KvCost)
    included: int = 0
    most: Callable[[], int] = lambda: 0
    answer_tokens: int = 256
    chunk_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """How rows of such lengths, in tokens, lie in memory.

    Those `together` decode, or will once they are read: their KV is a rectangle, rows times the
    longest of them (measured: one long row among seven short ones takes 14 times the memory of
    them all). Those `apart` have caches of their own: they are parked, or read for one token.
    """

    together: Sequence[int] = ()
    apart: Sequence[int] = ()

    def __bool__(self) -> bool:
        return bool(self.together or self.apart)

    def nbytes(self, costs: RowCosts) -> int:
        """Return the bytes: what is held of rows that are being read is padded by a chunk at most,
        and windows hold a chunk more than they keep.
        """
        if not self:
            return 0
        kv, chunk = costs.kv, costs.chunk_tokens
        longest = max(self.together, default=0)
        rectangle = len(self.together) * kv.of(longest + KV_STEP, chunk) if longest else 0
        return rectangle + sum(kv.of(each + KV_STEP, chunk) for each in self.apart) + kv.of(chunk)


def longest_chunk(chunk_tokens: int) -> int:
    """Return the most tokens of a chunk: a prompt's end is read with its last one, if it is at most
    a quarter of it.
    """
    return chunk_tokens + chunk_tokens // 4


class RowMemory:
    """One model's rows' share of the budget. `clear` lets idle models go for so many bytes, those
    used a moment ago only if it is pressing.

    `kept` counts the bytes of prefixes, which give way to rows, and to whoever else is short.
    """

    def __init__(
        self,
        budget: Budget,
        costs: RowCosts,
        clear: Callable[[int, bool], None] = lambda _nbytes, _is_pressing: None,
    ) -> None:
        self._budget = budget
        self._costs = costs
        self._clear = clear
        self._share = budget.share()
        self.kept = 0
        self._is_recalled = False

    @property
    def must_forget(self) -> bool:
        """Return True if kept prefixes hold memory that others need, or beyond the budget."""
        return self.kept > 0 and (self._is_recalled or self._budget.free_bytes < 0)

    def adopt(self, chunk_tokens: int) -> None:
        """Count prompts as read in chunks of this size from now on."""
        self._costs = replace(self._costs, chunk_tokens=chunk_tokens)

    def check(self, model: str, row: SequenceParams) -> None:
        """Raise PromptTooLarge for a prompt that, alone, leaves no room for one token.

        `max_tokens` does not count: it is a bound, not a need.
        """
        if (longest := self.longest) <= len(row.prompt):
            raise PromptTooLarge(model, len(row.prompt), max(0, longest - 1))

    @property
    def longest(self) -> int:
        """Return the most tokens, prompt and answer, that a row could ever have."""
        if not self._costs.kv:
            return LONGEST
        most = max(self._costs.most(), self._costs.included)

        def alone(length: int) -> int:
            return Layout([length]).nbytes(self._costs)

        return bisect_right(range(1, LONGEST), most, key=alone)

    def grant_length(self, used: int, whole: int, preemptions: int) -> int:
        """Return the length that a row is counted by when it joins with `used` tokens of KV, of the
        `whole` it may come to.

        One that was preempted has room for a longer answer each time, so that it soon stays.
        """
        wanted = used + (self._costs.answer_tokens << preemptions)
        return min(whole, max(used + 1, min(wanted, self.longest)))

    def fits(self, layout: Layout, *, grown: bool = False) -> bool:
        """Return True if there is memory for these rows, if they are all there are. Those that have
        only `grown` may take what a model waits for; new ones may not.
        """
        budget = self._budget
        return self._lacking(layout, budget.free_bytes if grown else budget.spare_bytes) <= 0

    def hold(self, layout: Layout) -> None:
        """Hold what these rows take, and what is kept of prefixes."""
        if self._costs.kv:
            rows = max(0, layout.nbytes(self._costs) - self._costs.included)
            self._share.resize(rows + self.kept)

    def make_room(self, layout: Layout, *, is_pressing: bool) -> None:
        """Evict idle models, if these rows fit then. It is pressing if no row runs whose end would
        free memory. While a model waits for bytes, rows wait for those of rows.
        """
        free = self._budget.free_bytes
        if not self._budget.claimed_bytes and (lacking := self._lacking(layout, free)) > 0:
            self._clear(lacking + max(0, free), is_pressing)

    def forget(self) -> None:
        """Note that what is kept goes in this turn."""
        self._is_recalled = False
        self.kept = 0

    def keep(self, nbytes: int) -> None:
        """Note what is kept of prefixes now."""
        self.kept = nbytes

    @contextlib.contextmanager
    def watch(self, news: Callable[[], None]) -> Iterator[None]:
        """Call `news` while entered, whenever there may be bytes for waiting rows, and when kept
        prefixes have to be freed.
        """

        def recalled() -> None:
            if self.kept:
                self._is_recalled = True
                news()

        self._budget.listen(news, recalled)
        try:
            yield
        finally:
            self._budget.unlisten(news)

    def release(self) -> None:
        """Hold nothing any more."""
        self._share.release()

    def _lacking(self, layout: Layout, available: int) -> int:
        """Return the bytes that rows lack, beyond the available, if they are all there are."""
        if not self._costs.kv:
            return 0
        needed = layout.nbytes(self._costs) - self._costs.included + self.kept
        return needed - self._share.nbytes - max(0, available)
