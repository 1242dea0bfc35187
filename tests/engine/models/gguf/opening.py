"""Helpers that open GGUF files for the tests."""

from collections.abc import Generator
from typing import Any

from gateway.engine.device import Device
from gateway.engine.models.gguf.checkpoint import GgufCheckpoint, read_gguf_decoder


def open_decoder_of(
    checkpoint: GgufCheckpoint,
    *,
    device: Device = Device.CPU,
    dtype: str | None = None,
    is_packed: bool = False,
) -> Any:
    """Return mlx-lm's model of a file, all its steps taken."""
    return ended(read_gguf_decoder(checkpoint, device=device, dtype=dtype, is_packed=is_packed))


def ended(steps: Generator[None, None, Any]) -> Any:
    """Take every step; return the final value."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
