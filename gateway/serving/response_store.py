"""Responses kept in memory for `previous_response_id`, by owner.

An owner is an API key, or None where there are no keys: it neither finds nor evicts the responses
of others. Safe on any thread.
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
    """One response as JSON, with its input and output items."""

    id: str
    body: bytes
    # The whole conversation before it, with the items of earlier responses.
    context: Sequence[StoredItem]
    output: Sequence[StoredItem]

    @property
    def items(self) -> Sequence[StoredItem]:
        """Return the conversation so far, with this response."""
        return (*self.context, *self.output)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its JSON. Items shared with another response count in both."""
        return len(self.body) + sum(len(item.body) for item in self.items)


@dataclass(slots=True)
class _Owned:
    """One owner's responses, oldest first, each with the time it expires at."""

    responses: OrderedDict[str, tuple[float, StoredResponse]] = field(default_factory=OrderedDict)
    nbytes: int = 0
    # Items by id, each as often as there are responses with it.
    items: dict[str, list[StoredItem]] = field(default_factory=dict)

    def add(self, response: StoredResponse, expires: float) -> None:
        self.responses[response.id] = (expires, response)
        self.nbytes += response.nbytes
        for item in response.items:
            self.items.setdefault(item.id, []).append(item)

    def remove(self, response_id: str) -> None:
        _, response = self.responses.pop(response_id)
        self.nbytes -= response.nbytes
        for item in response.items:
            self.items[item.id].remove(item)
            if not self.items[item.id]:
                del self.items[item.id]

    def oldest(self) -> str:
        return next(iter(self.responses))


class ResponseStore:
    """At most `max_responses` responses and `max_bytes` for each owner, kept for `ttl_s` seconds.
    0 responses keeps none.
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
        self._by_owner: dict[str | None, _Owned] = {}
        self._lock = threading.RLock()

    @property
    def is_on(self) -> bool:
        """Return True if responses are kept."""
        return self._max_responses > 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of all kept responses."""
        return sum(owned.nbytes for owned in self._by_owner.values())

    def __len__(self) -> int:
        return sum(len(owned.responses) for owned in self._by_owner.values())

    def keep(self, owner: str | None, response: StoredResponse) -> bool:
        """Keep a response; return False if it alone exceeds an owner's bytes."""
        with self._lock:
            self.expire()
            if not self.is_on or response.nbytes > self._max_bytes:
                return False
            # An owner's newest response evicts its oldest, and nobody else's.
            owned = self._by_owner.setdefault(owner, _Owned())
            while (
                len(owned.responses) >= self._max_responses
                or owned.nbytes + response.nbytes > self._max_bytes
            ):
                owned.remove(owned.oldest())
            owned.add(response, self._now() + self._ttl_s)
            return True

    def find(self, owner: str | None, response_id: str) -> StoredResponse | None:
        """Return an owner's response, if it is still kept."""
        with self._lock:
            self.expire()
            owned = self._by_owner.get(owner, _Owned())
            if response_id not in owned.responses:
                return None
            return owned.responses[response_id][1]

    def item(self, owner: str | None, item_id: str) -> StoredItem | None:
        """Return an item of any of an owner's responses; the newest of several with one id."""
        with self._lock:
            self.expire()
            owned = self._by_owner.get(owner, _Owned())
            if item_id not in owned.items:
                return None
            return owned.items[item_id][-1]

    def delete(self, owner: str | None, response_id: str) -> bool:
        """Delete a response; return False if there is none."""
        with self._lock:
            if self.find(owner, response_id) is None:
                return False
            self._by_owner[owner].remove(response_id)
            return True

    def expire(self) -> None:
        """Delete the responses that have expired."""
        with self._lock:
            for owned, response_id in list(self._expired(self._now())):
                owned.remove(response_id)

    def _expired(self, now: float) -> Iterator[tuple[_Owned, str]]:
        for owned in self._by_owner.values():
            for response_id, (expires, _) in owned.responses.items():
                if expires > now:
                    break  # kept in order
                yield owned, response_id
