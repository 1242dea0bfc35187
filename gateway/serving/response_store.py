"""Keeps responses in memory, so that requests can name a `previous_response_id`.

An owner of responses is an API key, or None if there are no keys.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256


@dataclass(frozen=True, slots=True)
class StoredImage:
    """The text of an image, such as a data: URL."""

    text: str = field(compare=False, repr=False)
    digest: bytes
    nbytes: int

    @classmethod
    def of(cls, text: str) -> "StoredImage":
        encoded = text.encode()
        return cls(text, sha256(encoded).digest(), len(encoded))


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A message, a call, a call's output, or reasoning, as JSON without the texts of images."""

    id: str
    body: bytes
    images: Sequence[StoredImage] = ()


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response as JSON, with its input and output items."""

    id: str
    body: bytes
    # The conversation before this response's output, including earlier responses.
    context: Sequence[StoredItem]
    output: Sequence[StoredItem]

    @property
    def items(self) -> Sequence[StoredItem]:
        return (*self.context, *self.output)

    @property
    def images(self) -> Mapping[bytes, StoredImage]:
        return {image.digest: image for item in self.context for image in item.images}

    @property
    def nbytes(self) -> int:
        """Return the bytes of the JSON and of the images, each image once."""
        json = len(self.body) + sum(len(item.body) for item in self.items)
        return json + sum(image.nbytes for image in self.images.values())


@dataclass(slots=True)
class _Owned:
    """One owner's responses, oldest first, each with the time at which it expires."""

    responses: OrderedDict[str, tuple[float, StoredResponse]] = field(default_factory=OrderedDict)
    nbytes: int = 0
    # Items by id, each as often as responses have it.
    items: dict[str, list[StoredItem]] = field(default_factory=dict)
    images: dict[bytes, StoredImage] = field(default_factory=dict)  # by digest
    uses: Counter[bytes] = field(default_factory=Counter)

    def growth(self, response: StoredResponse) -> int:
        """Return the bytes that a response adds, without images that are stored already."""
        shared = self.images.keys() & response.images.keys()
        return response.nbytes - sum(self.images[digest].nbytes for digest in shared)

    def add(self, response: StoredResponse, expires: float) -> None:
        self.nbytes += self.growth(response)
        for digest, image in response.images.items():
            self.images.setdefault(digest, image)
        self.uses.update(response.images.keys())
        response = replace(response, context=[self._shared(item) for item in response.context])
        self.responses[response.id] = (expires, response)
        for item in response.items:
            self.items.setdefault(item.id, []).append(item)

    def remove(self, response_id: str) -> None:
        _, response = self.responses.pop(response_id)
        self.nbytes -= response.nbytes
        for digest, image in response.images.items():
            self.uses[digest] -= 1
            if self.uses[digest]:
                self.nbytes += image.nbytes
            else:
                del self.images[digest], self.uses[digest]
        for item in response.items:
            self.items[item.id].remove(item)
            if not self.items[item.id]:
                del self.items[item.id]

    def _shared(self, item: StoredItem) -> StoredItem:
        if not item.images:
            return item
        return replace(item, images=[self.images[image.digest] for image in item.images])

    def oldest(self) -> str:
        return next(iter(self.responses))


class ResponseStore:
    """A store of at most `max_responses` and `max_bytes` for each owner, for `ttl_s` seconds.

    Safe on any thread.
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
        return self._max_responses > 0

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(owned.nbytes for owned in self._by_owner.values())

    def __len__(self) -> int:
        with self._lock:
            return sum(len(owned.responses) for owned in self._by_owner.values())

    def keep(self, owner: str | None, response: StoredResponse) -> bool:
        """Keep a response if possible, and evict the owner's oldest ones if necessary."""
        with self._lock:
            self.expire()
            if not self.is_on or response.nbytes > self._max_bytes:
                return False
            owned = self._by_owner.setdefault(owner, _Owned())
            while (
                len(owned.responses) >= self._max_responses
                or owned.nbytes + owned.growth(response) > self._max_bytes
            ):
                owned.remove(owned.oldest())
            owned.add(response, self._now() + self._ttl_s)
            return True

    def find(self, owner: str | None, response_id: str) -> StoredResponse | None:
        with self._lock:
            self.expire()
            owned = self._by_owner.get(owner, _Owned())
            if response_id not in owned.responses:
                return None
            return owned.responses[response_id][1]

    def item(self, owner: str | None, item_id: str) -> StoredItem | None:
        """Return the newest item of an owner that has this id."""
        with self._lock:
            self.expire()
            owned = self._by_owner.get(owner, _Owned())
            if item_id not in owned.items:
                return None
            return owned.items[item_id][-1]

    def delete(self, owner: str | None, response_id: str) -> bool:
        with self._lock:
            if self.find(owner, response_id) is None:
                return False
            self._by_owner[owner].remove(response_id)
            return True

    def expire(self) -> None:
        with self._lock:
            for owned, response_id in list(self._expired(self._now())):
                owned.remove(response_id)

    def _expired(self, now: float) -> Iterator[tuple[_Owned, str]]:
        for owned in self._by_owner.values():
            for response_id, (expires, _) in owned.responses.items():
                if expires > now:
                    break  # later responses expire later
                yield owned, response_id
