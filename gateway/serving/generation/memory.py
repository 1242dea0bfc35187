"""The KV of a model's rows, counted before they join: what does not fit waits, and kills nobody."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from gateway.errors import BadRequest
from gateway.jobs import RowJob
from gateway.serving.budget import Budget

KV_STEP = 256  # tokens by which mlx-lm's caches grow
GROWTH = 1024  # tokens by which an open row asks for more, MARGIN before it needs them
MARGIN = 64  # more than one turn's steps


@dataclass(frozen=True, slots=True)
class RowCosts:
    """What rows cost in bytes: each token of KV, 0 where that is not known and nothing is counted;
    what the model's own share has for them already; what is left when only this model is here.

    A row that its client has bounded is counted whole, an open one as `answer_tokens` long.
    """

    token: int = 0
    included: int = 0
    most: int = 0
    answer_tokens: int = 4096


def rectangle(lengths: Sequence[int]) -> int:
    """Count the tokens of KV that rows of such lengths, prompt and answer, take at the most.

    KV is a rectangle, the rows times the longest of them, and one row more while some join or
    leave (measured: one long row among seven short ones takes 14 times the memory of them all).
    """
    if not lengths:
        return 0
    return (len(lengths) + 1) * _rounded_up(max(lengths))


class RowMemory:
    """One model's rows' share of the budget. `clear` lets idle models go for so many bytes.

    `kept` counts the bytes of prefixes, which give way to rows, and to whoever else is short.
    """

    def __init__(
        self, budget: Budget, costs: RowCosts, clear: Callable[[int], None] = lambda _: None
    ) -> None:
        self._budget = budget
        self._costs = costs
        self._clear = clear
        self._share = budget.share()
        self.kept = 0
        self._is_recalled = False

    @property
    def must_forget(self) -> bool:
        """Tell whether prefixes are kept in memory that others need, or that nobody may use."""
        return self.kept > 0 and (self._is_recalled or self._budget.free_bytes < 0)

    def admitted(self, row: RowJob) -> RowJob:
        """Give the row as it may be: an open one with as much room as there could ever be.

        Raises BadRequest for one that would not fit if it were alone.
        """
        longest = self._longest()
        whole = len(row.prompt) + row.max_tokens
        if longest is None or whole <= longest:
            return row
        if row.is_open and len(row.prompt) < longest:
            return replace(row, max_tokens=longest - len(row.prompt))
        raise BadRequest(
            f"A prompt of {len(row.prompt)} tokens and {row.max_tokens} more need more memory than "
            f"the gateway may use: together they can be {longest} here.",
            code="insufficient_memory",
            param="max_tokens" if len(row.prompt) < longest else None,
        )

    def counted(self, row: RowJob) -> int:
        """Give the tokens, prompt and answer, that a row is counted as when it joins."""
        answer = min(row.max_tokens, self._costs.answer_tokens) if row.is_open else row.max_tokens
        return len(row.prompt) + answer

    def fitting(self, running: Sequence[int], waiting: Sequence[int]) -> int:
        """Count how many of those who wait fit beside those who run; nobody is overtaken."""
        for count in range(len(waiting), 0, -1):
            if self._lacking([*running, *waiting[:count]]) <= 0:
                return count
        return 0

    def grown(self, length: int, others: Sequence[int], whole: int) -> int:
        """Give what a row counted as `length` is counted as from now on: more, if it is free."""
        wanted = min(whole, length + GROWTH)
        return wanted if self._lacking([*others, wanted]) <= 0 else length

    def hold(self, lengths: Sequence[int]) -> None:
        """Hold what these rows may come to need, and what is kept of prefixes."""
        if self._costs.token:
            rows = max(0, self._bytes(lengths) - self._costs.included)
            self._share.state(rows + self.kept)

    def make_room(self, lengths: Sequence[int]) -> None:
        """Let idle models go, if that helps these rows."""
        if (lacking := self._lacking(lengths)) > 0:
            self._clear(lacking + max(0, self._budget.free_bytes))

    def forget(self) -> None:
        """Note that what is kept goes in this turn."""
        self._is_recalled = False

    def keep(self, nbytes: int) -> None:
        """Note what is kept of prefixes now."""
        self.kept = nbytes

    @contextlib.contextmanager
    def watched(self, news: Callable[[], None]) -> Iterator[None]:
        """Have a function called, while entered, whenever there may be bytes for those who wait,
        and when what is kept is to go.
        """

        def recalled() -> None:
            if self.kept:
                self._is_recalled = True
                news()

        self._budget.listen(news, recalled)
        try:
            yield
        finally:
            self._budget.ignore(news)

    def release(self) -> None:
        """Hold nothing any more."""
        self._share.release()

    def _bytes(self, lengths: Sequence[int]) -> int:
        return rectangle(lengths) * self._costs.token

    def _lacking(self, lengths: Sequence[int]) -> int:
        """Count the bytes that rows lack, beyond what is free, if they are all there are."""
        if not self._costs.token:
            return 0
        needed = self._bytes(lengths) - self._costs.included + self.kept
        return needed - self._share.nbytes - max(0, self._budget.free_bytes)

    def _longest(self) -> int | None:
        """Give the most tokens that a row alone could ever have; None where nothing is counted."""
        if not self._costs.token:
            return None
        tokens = max(self._costs.most, self._costs.included) // self._costs.token
        return tokens // 2 // KV_STEP * KV_STEP


def _rounded_up(tokens: int) -> int:
    return -(-tokens // KV_STEP) * KV_STEP
