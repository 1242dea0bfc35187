"""A device in mlx's place that computes late and fails as real ones do, for tests of its faults.

Work that is launched fails only when something waits for the stream next, and then once, as MLX
stores and raises the errors of Metal (mlx/error.h); memory ends where work is launched.

A `LateDevice` fails later still: the wait for the work succeeds.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.utils import tree_flatten

_METAL = "[METAL] Command buffer execution failed: {} ({}:kIOGPUCommandBufferCallbackError{})."
IGNORED = _METAL.format(
    "Ignored (for causing prior/excessive GPU errors)", "00000004", "SubmissionsIgnored"
)
TIMEOUT = _METAL.format("Caused GPU Timeout Error", "00000002", "Timeout")
NO_MEMORY = "[malloc] Unable to allocate {} bytes."


class SimulatedDevice:
    """The acts of `mx.eval`, `mx.async_eval` and `mx.synchronize` while `installed`.

    `limit_bytes` bounds the arrays of one call. Work on a token of `faults` fails with its text.
    Once `is_dead` all work does, with the text of a process whose submissions Metal ignores.
    """

    def __init__(self) -> None:
        self.limit_bytes: int | None = None
        self.faults: dict[int, str] = {}
        self.is_dead = False
        self.failures = 0
        self._next: deque[str] = deque()
        self._stored: str | None = None

    def fail(self, *texts: str) -> None:
        """Let the next work fail, once for each text."""
        self._next.extend(texts)

    def launched(self, compute: Callable[..., None], *arrays: Any) -> None:
        """Compute arrays; store the failures."""
        self._allocate(arrays)
        compute(*arrays)
        if self.is_dead:
            self._stored = IGNORED
        elif self._next and self._stored is None:
            self._stored = self._next.popleft()

    def waited(self, compute: Callable[..., None], *arrays: Any) -> None:
        """Compute arrays and wait for them."""
        self.launched(compute, *arrays)
        self._raise()

    def embedded(self, states: Any, present: set[int]) -> Any:
        """Return the first states of a pass over these tokens."""
        for token in self.faults.keys() & present:
            self.fail(self.faults[token])
        return states

    @contextmanager
    def installed(self) -> Iterator["SimulatedDevice"]:
        eval_, async_eval, synchronize = mx.eval, mx.async_eval, mx.synchronize
        embed: Any = Embedding.__call__

        def synchronize_late(*stream: Any) -> None:
            synchronize(*stream)
            self._raise()

        def embed_tokens(layer: Any, tokens: mx.array) -> Any:
            present: Any = tokens.flatten().tolist() if self.faults else []
            return self.embedded(embed(layer, tokens), set(present))

        replaced: Any = mx
        Embedding.__call__ = embed_tokens  # type: ignore[method-assign]
        replaced.eval = lambda *arrays: self.waited(eval_, *arrays)
        replaced.async_eval = lambda *arrays: self.launched(async_eval, *arrays)
        replaced.synchronize = synchronize_late
        try:
            yield self
        finally:
            Embedding.__call__ = embed  # type: ignore[method-assign]
            replaced.eval, replaced.synchronize = eval_, synchronize
            replaced.async_eval = async_eval

    def _allocate(self, arrays: Any) -> None:
        nbytes = sum(array.nbytes for array in _leaves(arrays))
        if self.limit_bytes is not None and nbytes > self.limit_bytes:
            self.failures += 1
            raise RuntimeError(NO_MEMORY.format(nbytes))

    def _raise(self) -> None:
        text, self._stored = self._stored, None
        if text is not None:
            self.failures += 1
            raise RuntimeError(text)


class LateDevice(SimulatedDevice):
    """A GPU whose failed work looks as if it had succeeded.

    The numbers of such work are zeros, and the wait for it returns. Only then is the error stored,
    for whatever uses or waits for the stream next. So does Metal if a command buffer fails that is
    not the last one of an evaluation: https://github.com/ml-explore/mlx/issues/3979, and pull
    requests 4134 and 4174.
    """

    def __init__(self) -> None:
        super().__init__()
        self.works = 0  # evaluations of new arrays so far
        self._launched: deque[tuple[mx.array, int]] = deque(maxlen=1000)  # arrays with their work
        self._failing: tuple[int, str] | None = None  # a work under way, and its error
        self._due: tuple[int, str] | None = None  # a work that is to fail
        self._is_lasting = False

    def fail_at(self, work: int, text: str, *, is_lasting: bool = False) -> None:
        """Let one of the next works fail, the next one at 0, or that one and all after it."""
        self._due, self._is_lasting = (self.works + work, text), is_lasting

    @property
    def is_due(self) -> bool:
        """Return True if work is to fail, or nobody has been told yet that it did."""
        return bool(self._due or self._next or self._failing or self._stored)

    def relent(self) -> None:
        """Fail no more."""
        self._due = self._failing = self._stored = None
        self._next.clear()

    def launched(self, compute: Callable[..., None], *arrays: Any) -> None:
        """Compute arrays. Raise the error of earlier work if any of them is new."""
        new = [leaf for leaf in _leaves(arrays) if self._work_of(leaf) is None]
        if new:
            self._raise()
            self._allocate(arrays)
            if self.is_dead:
                self.fail(IGNORED)
            if self._due is not None and self.works >= self._due[0]:
                self.fail(self._due[1])
                self._due = self._due if self._is_lasting else None
            if self._next:
                self._failing = self._failing or (self.works, self._next.popleft())
                for leaf in new:
                    if mx.issubdtype(leaf.dtype, mx.floating) or leaf.dtype == mx.uint8:
                        leaf[...] = mx.zeros_like(leaf)
            self._launched.extend((leaf, self.works) for leaf in new)
            self.works += 1
        compute(*arrays)

    def waited(self, compute: Callable[..., None], *arrays: Any) -> None:
        """Compute arrays and wait for them: it is as if all were well."""
        self.launched(compute, *arrays)
        self._complete(max((self._work_of(leaf) or 0 for leaf in _leaves(arrays)), default=0))

    def embedded(self, states: Any, present: set[int]) -> Any:
        """Return zeros for a pass that fails: its first command buffer did."""
        super().embedded(states, present)
        return mx.zeros_like(states) if self._next or self.is_dead else states

    @contextmanager
    def installed(self) -> Iterator["LateDevice"]:
        replaced: Any = mx
        default_device, default_stream = mx.default_device, mx.default_stream
        with super().installed():
            synchronize = mx.synchronize

            def synchronize_all(*stream: Any) -> None:
                self._complete(self.works)
                synchronize(*stream)

            replaced.synchronize = synchronize_all
            replaced.default_device = lambda: mx.Device(mx.gpu, 0)
            replaced.default_stream = lambda _: default_stream(default_device())
            try:
                yield self
            finally:
                replaced.default_device, replaced.default_stream = default_device, default_stream

    def _work_of(self, array: mx.array) -> int | None:
        """Return which work an array is of; None if it needs a new one."""
        return next((work for known, work in self._launched if known is array), None)

    def _complete(self, work: int) -> None:
        """Store the error of this work or one before it."""
        if self._failing is not None and self._failing[0] <= work and self._stored is None:
            self._stored, self._failing = self._failing[1], None


def _leaves(arrays: Any) -> Iterator[mx.array]:
    named: Any = tree_flatten(list(arrays))
    return (array for _, array in named if isinstance(array, mx.array))
