"""The prefix cache: the KV of earlier prompts, in blocks.

A block is identified by its tokens and the block before it; a prompt's first block follows a root.
Each model and each adapter has its own root, because their KV differs. Each cache salt has its own
root, so that callers learn nothing about prompts with another salt.

Only plain KV can be split into blocks. Sliding windows and recurrent states, both called states
below, are stored whole after some blocks. A prompt can continue only after such a block.
"""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count, takewhile
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from gateway.engine.device import KeptBuffers, evaluate
from gateway.engine.kv.cache import RaggedKVCache, copy_rows
from gateway.engine.kv.layers import for_batch
from gateway.engine.kv.prefix_pieces import Key, decode, encode, follow
from gateway.jobs.steps import PrefixPiece

BLOCK = 64  # tokens per block, and so the shortest prefix that is cached
# States of running answers ("growing" states) need room for MIN_SETS sets of states, and take at
# most GROWING_SHARE of the pool. Otherwise they would evict KV that prompts share.
MIN_SETS = 8
GROWING_SHARE = 0.5
_TOKEN_BYTES = 8  # bytes per token of an entry's key, so that entries without KV count too

Root: TypeAlias = tuple[int, str]  # an adapter's number, 0 for none; and the cache salt
ROOT: Root = (0, "")


@dataclass(frozen=True, slots=True)
class _Entry:
    """The planes of a cached block, or the cached states after a block."""

    owner: "PrefixCache"
    number: int
    layers: Sequence[Any]
    nbytes: int
    buffers: int


class PrefixPool:
    """The memory that the prefix caches of one or more models share.

    States of running answers are evicted first, because most of them are never used. Then the least
    recently used entry is evicted.
    """

    def __init__(self, limit: int, buffers: KeptBuffers | None = None) -> None:
        self.limit = limit  # bytes; may change
        self.is_on = limit > 0  # never changes
        self.nbytes = 0
        self.numbers = count(1)  # numbers of blocks, which identify them
        self.roots = count(0, -1)
        # Least recently used first. A block comes before its predecessor in the prompt, so the
        # first entry has no successors.
        self.entries: OrderedDict[Key, _Entry] = OrderedDict()
        self.growing: dict[Key, None] = {}  # states of running answers, the oldest first
        self._buffers = buffers or KeptBuffers()

    def shrink(self) -> None:
        while self.nbytes > self.limit:
            self.drop(next(chain(self.growing, self.entries)))

    def has_room(self, nbytes: int, buffers: int) -> bool:
        has_buffers = self._buffers.count + buffers <= self._buffers.limit
        return has_buffers and self.nbytes + nbytes <= self.limit

    def next_evicted(self, nbytes: int, *, is_growing: bool) -> Key | None:
        growing = sum(self.entries[key].nbytes for key in self.growing)
        if not is_growing or growing + nbytes > GROWING_SHARE * self.limit:
            keys: Iterable[Key] = chain(self.growing, self.entries)
        else:
            keys = (key for key in self.entries if key not in self.growing)
        return next(iter(keys), None)

    def add(self, key: Key, entry: _Entry) -> None:
        self.entries[key] = entry
        self._count(entry, 1)

    def drop(self, key: Key) -> None:
        self.growing.pop(key, None)
        self._count(self.entries.pop(key), -1)

    def _count(self, entry: _Entry, times: int) -> None:
        self.nbytes += times * entry.nbytes
        entry.owner.nbytes += times * entry.nbytes
        self._buffers.count += times * entry.buffers


class PrefixCache:
    """The prefix cache of one model."""

    def __init__(
        self,
        empty: Sequence[Any],
        pool: PrefixPool,
        states: int = 0,
    ) -> None:
        self.pool = pool
        self.is_on = pool.is_on
        self.nbytes = 0
        self._states = states  # the largest size of a set of states, in bytes
        self._empty = [for_batch(layer) for layer in empty]
        self._is_plain = [isinstance(layer, RaggedKVCache) for layer in self._empty]
        self._roots: dict[Root, int] = {}  # numbers of roots
        self._entries, self._growing = pool.entries, pool.growing
        # The last block of each routing key's prefix, by root and routing key.
        self._routed: dict[tuple[Root, bytes], Key] = {}

    @property
    def pool_bytes(self) -> int:
        return self.pool.nbytes

    @property
    def needs_block_ends(self) -> bool:
        """Return True if the model has states, which must be cached right after a block is read."""
        return self.is_on and not all(self._is_plain)

    @property
    def keeps_growing(self) -> bool:
        return self.pool.limit >= MIN_SETS * self._states

    def count_known(self, tokens: Sequence[int], root: Root = ROOT) -> int:
        """Count the prompt's first tokens that need not be read."""
        return BLOCK * len(self._usable(tokens, root))

    def count_kept(self, tokens: Sequence[int], root: Root = ROOT) -> int:
        """Count the prompt's first tokens whose blocks are cached, with or without states."""
        return BLOCK * len(self._path(tokens, root))

    def take(self, tokens: Sequence[int], root: Root = ROOT) -> tuple[int, list[Any] | None]:
        """Return how many first tokens need not be read, and a prompt cache with their KV, or None.

        Don't write to this prompt cache: merge it into a batch.
        """
        path = self._usable(tokens, root)
        if not path:
            return 0, None
        blocks = [self._entries[key] for key in path]
        states: Sequence[Any] = ()
        if self.needs_block_ends:
            path.append(self._state_key(path))
            states = self._entries[path[-1]].layers
        self._use(path)
        length = BLOCK * len(blocks)
        pages = zip(*(block.layers for block in blocks), strict=True)
        empty, _ = self._split(self._empty)
        plain, others = map(_join, empty, pages), iter(states)
        return length, [next(plain if is_plain else others) for is_plain in self._is_plain]

    def routing_keys(self, adapter: int = 0) -> list[bytes]:
        """List the routing keys of the cached prompts, the oldest first. Safe on any thread."""
        routed = list(self._routed.items())
        return [name for (root, name), key in routed if root[0] == adapter and key in self._entries]

    def store(
        self,
        tokens: Sequence[int],
        layers: Sequence[Any],
        row: int,
        routed: Sequence[tuple[int, bytes]] = (),
        root: Root = ROOT,
        *,
        is_growing: bool = False,
    ) -> int:
        """Store the full blocks of tokens that a row has read; return how many are new.

        If the cache `needs_block_ends`, the tokens must end with a full block. `routed` has pairs
        of a prefix's length and its routing key.
        """
        whole = len(tokens) - len(tokens) % BLOCK
        if not self.is_on or (self.needs_block_ends and whole < len(tokens)):
            return 0
        plain, stateful = self._split(layers)
        if any(layer.size() < whole for layer in plain):
            return 0  # this model doesn't use all of its caches
        path = self._path(tokens, root)
        known = len(path)
        self._use(path)
        for start in range(BLOCK * len(path), whole, BLOCK):
            pages = [layer.copy_tokens(row, start, start + BLOCK) for layer in plain]
            key = (self._after(path, root), *tokens[start : start + BLOCK])
            if not self._put(key, pages, path, is_growing=is_growing):
                break
        new = BLOCK * (len(path) - known)
        is_there = bool(path) and len(path) * BLOCK == whole
        if stateful and is_there:
            self._keep_states(path, stateful, row, is_growing=is_growing)
        self._use(path)
        self._route(path, routed, root)
        return new

    def store_next(
        self,
        tokens: Sequence[int],
        layers: Sequence[Any],
        row: int,
        dropped: Sequence[int],
        root: Root = ROOT,
        *,
        is_growing: bool = True,
    ) -> bool:
        """Store the last block of `tokens` and the states after it; return True if they are new.

        If they are new, the states after the first n tokens are dropped for each n in `dropped`.
        """
        path = self._path(tokens, root)
        if len(path) < len(tokens) // BLOCK - 1:
            return False  # an earlier block was evicted
        was_there = self._has_states(path, tokens)
        self.store(tokens, layers, row, root=root, is_growing=is_growing)
        path = self._path(tokens, root)
        if was_there or not self._has_states(path, tokens):
            return False
        for end in dropped:
            key = self._state_key(path[: end // BLOCK])
            if key in self._entries:
                self.pool.drop(key)
        return True

    def note_ended(self, tokens: Sequence[int], ends: Sequence[int], root: Root = ROOT) -> None:
        """Mark a finished answer's states, at the positions `ends`, as recently used."""
        path = self._path(tokens, root)
        for end in ends:
            key = self._state_key(path[: end // BLOCK])
            if BLOCK * len(path) >= end and key in self._entries:
                self._use([key])
        self._use(path)

    def forget(self, adapter: int) -> None:
        gone = {number for root, number in self._roots.items() if root[0] == adapter}
        for key, block in sorted(self._entries.items(), key=lambda item: item[1].number):
            if key[0] in gone:  # the block before it is dropped
                gone.add(block.number)
                self.pool.drop(key)

    def pieces(self, adapter: int = 0) -> list[PrefixPiece]:
        """List an adapter's KV as pieces, the most recently used first.

        A piece is a run of blocks: the prompts A B C and A B D give the pieces A B, C and D.
        """
        following: dict[int, list[Key]] = defaultdict(list)
        for key, entry in self._entries.items():
            if entry.owner is self and len(key) > 1:  # a block, not states
                following[key[0]].append(key)
        pieces: dict[Key, PrefixPiece] = {}
        starts: list[tuple[str, int, PrefixPiece | None, int]] = [
            (salt, root, None, 0) for (of, salt), root in self._roots.items() if of == adapter
        ]
        while starts:
            salt, after, before, place = starts.pop()
            for key in following[after]:
                run = follow(key, place, self._entries, following)
                own = [token for key in run for token in key[1:]]
                pieces[key] = PrefixPiece(salt, own, before)
                last = self._entries[run[-1]].number
                starts.append((salt, last, pieces[key], place + len(run)))
        return [pieces[key] for key in reversed(self._entries) if key in pieces]

    def copy_piece(self, adapter: int, piece: PrefixPiece) -> bytes | None:
        """Encode a piece as bytes; return None if a part of it has been evicted."""
        tokens = piece.tokens
        path = self._path(tokens, (adapter, piece.salt))
        if BLOCK * len(path) < len(tokens):
            return None
        own = path[-len(piece.own) // BLOCK :]
        after = self._entries.get(self._state_key(path))
        states = None if after is None else [layer.state for layer in after.layers]
        return encode((tokens, [self._entries[key].layers for key in own], states))

    def put_piece(self, adapter: int, salt: str, content: bytes) -> bool:
        """Store a piece as the least recently used entries. Return False if there is no room.

        Raises any exception for invalid content.
        """
        tokens, blocks, states = decode(content)
        arrays = _arrays([blocks, states])
        nbytes = sum(array.nbytes for array in arrays) + _TOKEN_BYTES * 2 * len(tokens)
        if not self.is_on or not self.pool.has_room(nbytes, len(arrays)):
            return False
        root = adapter, salt
        path = self._path(tokens, root)
        missing = len(tokens) // BLOCK - len(path)
        if missing > len(blocks):
            return True
        for pages in blocks[len(blocks) - missing :]:
            start = BLOCK * len(path)
            self._put_back((self._after(path, root), *tokens[start : start + BLOCK]), pages, path)
        key = self._state_key(path)
        if states is not None and key not in self._entries:
            _, layers = self._split(copy.deepcopy(self._empty))
            for layer, state in zip(layers, states, strict=True):
                layer.state = state
            self._put_back(key, layers, path)
        return True

    def _put_back(self, key: Key, layers: Sequence[Any], path: list[Key]) -> None:
        if not self._put(key, layers, path, is_growing=False):
            raise ValueError("its numbers are not finite")
        self._entries.move_to_end(key, last=False)

    def stop(self) -> None:
        """Drop everything, and store nothing from now on."""
        self.is_on = False
        self.clear()

    def clear(self) -> None:
        for key in [key for key, entry in self._entries.items() if entry.owner is self]:
            self.pool.drop(key)
        self._routed.clear()

    def _split(self, layers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        pairs = list(zip(layers, self._is_plain, strict=True))
        plain = [layer for layer, is_plain in pairs if is_plain]
        return plain, [layer for layer, is_plain in pairs if not is_plain]

    def _path(self, tokens: Sequence[int], root: Root) -> list[Key]:
        path: list[Key] = []
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = (self._after(path, root), *tokens[start : start + BLOCK])
            if key not in self._entries:
                break
            path.append(key)
        return path

    def _has_states(self, path: Sequence[Key], tokens: Sequence[int]) -> bool:
        """Return True if the path has all the tokens, and states are cached after it."""
        return BLOCK * len(path) == len(tokens) and self._state_key(path) in self._entries

    def _usable(self, tokens: Sequence[int], root: Root) -> list[Key]:
        """List the keys of the cached blocks up to the last after which a prompt can continue."""
        path = self._path(tokens, root)
        while path and self.needs_block_ends and self._state_key(path) not in self._entries:
            path.pop()
        return path

    def _route(self, path: Sequence[Key], routed: Sequence[tuple[int, bytes]], root: Root) -> None:
        for end, name in routed:
            if 0 < end <= BLOCK * len(path):
                self._routed[root, name] = path[(end - 1) // BLOCK]
        if len(self._routed) > 2 * len(self._entries) + BLOCK:
            self._routed = {name: key for name, key in self._routed.items() if key in self._entries}

    def _after(self, path: Sequence[Key], root: Root = ROOT) -> int:
        """Return the number of a path's last block; for an empty path, the number of the root."""
        if path:
            return self._entries[path[-1]].number
        if root not in self._roots:
            self._roots[root] = next(self.pool.roots)
        return self._roots[root]

    def _state_key(self, path: Sequence[Key]) -> Key:
        return (self._after(path),)

    def _use(self, path: Sequence[Key]) -> None:
        for key in reversed(path):
            self._entries.move_to_end(key)
            self._growing.pop(key, None)

    def _keep_states(
        self, path: Sequence[Key], layers: Sequence[Any], row: int, *, is_growing: bool
    ) -> None:
        key = self._state_key(path)
        if key not in self._entries:
            states = [_extract(layer, row) for layer in layers]
            if self._put(key, states, list(path), is_growing=is_growing) and is_growing:
                self._growing[key] = None
        elif not is_growing:
            self._use([key])

    def _put(self, key: Key, layers: Sequence[Any], path: list[Key], *, is_growing: bool) -> bool:
        """Store layers and append their key to the path. Return False for NaN or lack of room."""
        arrays = [array for layer in layers for array in _arrays(layer)]
        nbytes = sum(array.nbytes for array in arrays) + _TOKEN_BYTES * len(key)
        while not self.pool.has_room(nbytes, len(arrays)):
            evicted = self.pool.next_evicted(nbytes, is_growing=is_growing)
            if evicted is None or evicted in path:
                return False
            self.pool.drop(evicted)
        # A NaN in one layer makes all later layers NaN, so only the last one is checked.
        are_finite = [mx.isfinite(array).all() for array in _arrays(layers[-1])] if layers else []
        # Evaluate before storing, so that an error is raised for the sequence that was read.
        evaluate(arrays, are_finite)
        if not all(is_finite.item() for is_finite in are_finite):
            return False
        number = next(self.pool.numbers)
        self.pool.add(key, _Entry(self, number, layers, nbytes, len(arrays)))
        path.append(key)
        return True


def count_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens in the full blocks that two prompts share at their beginning."""
    starts = range(0, min(len(one), len(other)) - BLOCK + 1, BLOCK)
    alike = takewhile(lambda at: one[at : at + BLOCK] == other[at : at + BLOCK], starts)
    return BLOCK * sum(1 for _ in alike)


def _extract(layer: Any, row: int) -> Any:
    # Some caches return views, which would keep the whole batch's buffers alive.
    cache = layer.extract(row)
    cache.state = tree_map(
        lambda leaf: copy_rows(leaf) if isinstance(leaf, mx.array) else leaf, cache.state
    )
    return cache


def _join(empty: RaggedKVCache, pages: Sequence[Sequence[mx.array]]) -> RaggedKVCache:
    planes = zip(*pages, strict=True)
    return empty.holding([mx.concatenate(list(plane), axis=2) for plane in planes])


def _arrays(layer: Any) -> list[mx.array]:
    leaves: Any = tree_flatten(layer if isinstance(layer, list) else layer.state)
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]
