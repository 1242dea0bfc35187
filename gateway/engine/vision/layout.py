"""The positions of tokens for M-RoPE (Qwen2-VL, https://arxiv.org/abs/2409.12191, 2.1)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The positions of a prompt's tokens."""

    points: Points  # (tokens, 3): time, row and column, which are equal for text
    shift: int = 0  # position minus index of the tokens after the prompt

    def at(self, index: int) -> int:
        if index >= len(self.points):
            return self.shift
        return int(self.points[index, 0]) - index

    def window(self, start: int, width: int) -> Points:
        """Return the positions of `width` tokens from `start` on, also beyond the prompt."""
        inside = self.points[start : start + width]
        behind = np.arange(start + len(inside), start + width, dtype=np.int32) + self.shift
        return np.concatenate([inside, np.repeat(behind[:, None], 3, axis=1)])


def lay_out(tokens: int, images: Iterable[tuple[int, tuple[int, int]]]) -> Layout:
    """Return a prompt's layout, for pairs of an image's first token and (rows, columns).

    Text after an image continues at the image's position plus its longer side.
    """
    points: list[Any] = []
    index = place = 0
    for start, (rows, columns) in images:
        text = np.arange(place, place + start - index)
        place += start - index
        row, column = (each.reshape(-1) for each in np.mgrid[:rows, :columns])
        points += [np.stack([text] * 3, 1), np.stack([0 * row, row, column], 1) + place]
        place += max(rows, columns)
        index = start + rows * columns
    points.append(np.stack([np.arange(place, place + tokens - index)] * 3, 1))
    return Layout(np.concatenate(points).astype(np.int32), place - index)
