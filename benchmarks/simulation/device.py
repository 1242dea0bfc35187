"""The costs of a device's stages, in seconds: measured, or made of published figures."""

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size, through measured points: straight between them, and beyond the last.

    Below the first point the cost is the first point's: a pass has a fixed cost.
    """

    sizes: Sequence[float]
    seconds: Sequence[float]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise ValueError("a curve needs as many seconds as sizes, and at least one")
        if sorted(set(self.sizes)) != list(self.sizes):
            raise ValueError(f"sizes of a curve rise: {self.sizes}")

    def __call__(self, size: float) -> float:
        """Return the seconds of a pass of this size."""
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0]:
            return seconds[0]
        if len(sizes) == 1:
            return seconds[0] * size / sizes[0]
        end = min(bisect_left(sizes, size), len(sizes) - 1)
        share = (size - sizes[end - 1]) / (sizes[end] - sizes[end - 1])
        return seconds[end - 1] + share * (seconds[end] - seconds[end - 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The stage costs of one gateway.

    `embedding` and `prefill` are by padded tokens, `decode` by rows. `resume_s` is the extra cost
    of the first step after another kind's turn: its weights left the caches, and no step was
    launched ahead. `turn_s` is a hop to the lane's thread. `embedding_s`, `chat_s` and `token_s`
    are Python's, one core's worth, for a request and for each token of an answer. `contention` is
    the time that a second of Python adds to a pass that runs meanwhile: 0 for a GPU, 1 where both
    use the same cores. `rows` is the most answers at once that its memory has room for.
    """

    name: str
    embedding: Curve
    prefill: Curve
    decode: Curve
    turn_s: float
    embedding_s: float
    chat_s: float
    token_s: float
    contention: float = 0.0
    resume_s: float = 0.0
    rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """The costs of a client on the same machine: seconds a request, and a token of an answer."""

    request_s: float = 0.0
    token_s: float = 0.0


def read_device(path: Path) -> Device:
    """Read a device that `write_device` wrote; keys beside its own, such as sources, are let be."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    known = {each.name: found[each.name] for each in fields(Device) if each.name in found}
    curves = {name: Curve(**known[name]) for name in ("embedding", "prefill", "decode")}
    return Device(**{**known, **curves})


def write_device(device: Device, path: Path, **more: Any) -> None:
    """Write a device as JSON."""
    path.write_text(json.dumps({**asdict(device), **more}, indent=2) + "\n", encoding="utf-8")
