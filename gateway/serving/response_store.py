"""Answered responses, kept for a while in memory so that a caller may go on from them.

Each owner (an API key; None where there are no keys) has a shelf of its own: nobody finds or
pushes out what another's request left here. It may be asked from any thread.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A message, a call, its output or reasoning, as JSON."""

    id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One answer as JSON, with every item it was made from and those it is made of.

    `context` is the whole conversation before the answer, that of earlier responses included.
    """

    id: str
    body: bytes
    context: Sequence[StoredItem]
    output: Sequence[StoredItem]

    @property
    def items(self) -> Sequence[StoredItem]:
        """Return the conversation so far, the answer included."""
        return (*self.context, *self.output)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its JSON. What it shares with another response is counted in both."""
        return len(self.body) + sum(len(item.body) for item in self.items)


@dataclass(slots=True)
class _Shelf:
    """One owner's responses, oldest first, each with the time it expires at."""

    responses: OrderedDict[str, tuple[float, StoredResponse]] = field(default_factory=OrderedDict)
    nbytes: int = 0
    items: dict[str, tuple[int, StoredItem]] = field(default_factory=dict)  # with how many hold it

    def add(self, response: StoredResponse, expires: float) -> None:
        self.responses[response.id] = (expires, response)
        self.nbytes += response.nbytes
        for item in response.items:
            holders, _ = self.items.get(item.id, (0, item))
            self.items[item.id] = (holders + 1, item)

    def remove(self, response_id: str) -> None:
        _, response = self.responses.pop(response_id)
        self.nbytes -= response.nbytes
        for each in response.items:
            holders, item = self.items.pop(each.id)
            if holders > 1:
                self.items[each.id] = (holders - 1, item)

    def oldest(self) -> str:
        return next(iter(self.responses))


class ResponseStore:
    """Bounded three ways: responses and bytes an owner may have, seconds a response is kept.

    An owner's oldest response leaves for its newest. `max_responses` 0 keeps none.
    """

    def __init__(
        self,
        *,
        max_responses: int,
        max_bytes: int,
        ttl_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._now = now
        self._shelves: dict[str | None, _Shelf] = {}
        self._lock = threading.RLock()

    @property
    def is_on(self) -> bool:
        """Return True if anything is kept at all."""
        return self._max_responses > 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of what is kept, of every owner."""
        return sum(shelf.nbytes for shelf in self._shelves.values())

    def __len__(self) -> int:
        return sum(len(shelf.responses) for shelf in self._shelves.values())

    def keep(self, owner: str | None, response: StoredResponse) -> bool:
        """Keep a response; return False if it alone is larger than all an owner may have."""
        with self._lock:
            self.expire()
            if not self.is_on or response.nbytes > self._max_bytes:
                return False
            shelf = self._shelves.setdefault(owner, _Shelf())
            while (
                len(shelf.responses) >= self._max_responses
                or shelf.nbytes + response.nbytes > self._max_bytes
            ):
                shelf.remove(shelf.oldest())
            shelf.add(response, self._now() + self._ttl_s)
            return True

    def find(self, owner: str | None, response_id: str) -> StoredResponse | None:
        """Return an owner's response, if it is still kept."""
        with self._lock:
            self.expire()
            shelf = self._shelves.get(owner)
            found = None if shelf is None else shelf.responses.get(response_id)
            return None if found is None else found[1]

    def item(self, owner: str | None, item_id: str) -> StoredItem | None:
        """Return an item of any response of an owner's; of several with one id, the newest."""
        with self._lock:
            self.expire()
            shelf = self._shelves.get(owner)
            found = None if shelf is None else shelf.items.get(item_id)
            return None if found is None else found[1]

    def delete(self, owner: str | None, response_id: str) -> bool:
        """Forget a response; return False if there is none."""
        with self._lock:
            if self.find(owner, response_id) is None:
                return False
            self._shelves[owner].remove(response_id)
            return True

    def expire(self) -> None:
        """Forget what has been kept for its time."""
        with self._lock:
            for shelf, response_id in list(self._expired(self._now())):
                shelf.remove(response_id)

    def _expired(self, now: float) -> Iterator[tuple[_Shelf, str]]:
        for shelf in self._shelves.values():
            for response_id, (expires, _) in shelf.responses.items():
                if expires > now:
                    break  # kept in order
                yield shelf, response_id
