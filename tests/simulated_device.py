"""A device in mlx's place that computes late and fails as real ones do, for tests of its faults.

Work that is launched fails only when something waits for the stream next, and then once, as MLX
stores and raises the errors of Metal (mlx/error.h); memory ends where work is launched.
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
    """What `mx.eval`, `mx.async_eval` and `mx.synchronize` do while `installed`.

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

    @contextmanager
    def installed(self) -> Iterator["SimulatedDevice"]:
        eval_, async_eval, synchronize = mx.eval, mx.async_eval, mx.synchronize
        embed: Any = Embedding.__call__

        def run(compute: Callable[..., None], *arrays: Any) -> None:
            self._allocate(arrays)
            compute(*arrays)
            if self.is_dead:
                self._stored = IGNORED
            elif self._next and self._stored is None:
                self._stored = self._next.popleft()

        def wait(*arrays: Any) -> None:
            run(eval_, *arrays)
            self._raise()

        def synchronize_late(*stream: Any) -> None:
            synchronize(*stream)
            self._raise()

        def embed_tokens(layer: Any, tokens: mx.array) -> Any:
            present: Any = tokens.flatten().tolist() if self.faults else []
            for token in self.faults.keys() & set(present):
                self.fail(self.faults[token])
            return embed(layer, tokens)

        replaced: Any = mx
        Embedding.__call__ = embed_tokens  # type: ignore[method-assign]
        replaced.eval, replaced.synchronize = wait, synchronize_late
        replaced.async_eval = lambda *arrays: run(async_eval, *arrays)
        try:
            yield self
        finally:
            Embedding.__call__ = embed  # type: ignore[method-assign]
            replaced.eval, replaced.synchronize = eval_, synchronize
            replaced.async_eval = async_eval

    def _allocate(self, arrays: Any) -> None:
        named: Any = tree_flatten(list(arrays))
        nbytes = sum(array.nbytes for _, array in named if isinstance(array, mx.array))
        if self.limit_bytes is not None and nbytes > self.limit_bytes:
            self.failures += 1
            raise RuntimeError(NO_MEMORY.format(nbytes))

    def _raise(self) -> None:
        text, self._stored = self._stored, None
        if text is not None:
            self.failures += 1
            raise RuntimeError(text)
