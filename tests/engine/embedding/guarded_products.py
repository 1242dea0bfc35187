"""Multiplies by a core's kernels between pages that kill the process that touches them.

Arguments: the core, and the floats that are missing at each buffer's end.
"""

import ctypes
import mmap
import sys
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from gateway.engine.blas import BLAS
from gateway.engine.embedding import packed
from gateway.engine.embedding.packed import Floats, Kernels, find_kernels

PAGE = mmap.PAGESIZE
LARGEST = 1 << 19


class Buffer:
    """Floats between two pages without access."""

    def __init__(self) -> None:
        self._pages = mmap.mmap(-1, 4 * LARGEST + 2 * PAGE)
        whole = np.frombuffer(self._pages, np.float32)
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for page in (0, len(self._pages) - PAGE):
            assert protect(ctypes.c_void_p(whole.ctypes.data + page), PAGE, 0) == 0
        self._floats = whole[PAGE // 4 :][:LARGEST]

    def take(self, at_end: bool, *shape: int) -> Floats:
        size = prod(shape)
        taken = self._floats[LARGEST - size :] if at_end else self._floats[:size]
        return taken.reshape(shape)


class Products:
    """Products whose buffers all begin, or end, at a page without access."""

    def __init__(self, kernels: Kernels, missing: int) -> None:
        self._kernels, self._missing = kernels, missing
        self._buffers = [Buffer() for _ in range(5)]
        self._draw = np.random.default_rng(0)

    def check(self, rows: int, outputs: int, inputs: int, beside: int, at_end: bool) -> None:
        """Multiply parts of matrices that have `beside` more columns; compare with numpy."""
        pack_weight, pack_rows, add_product = self._kernels
        whole, width = inputs + beside, outputs + beside
        shapes = ((outputs, whole), (rows, whole), (rows, width), (outputs, inputs), (rows, inputs))
        arrays = [b.take(at_end, *shape) for b, shape in zip(self._buffers, shapes, strict=True)]
        weight, x, sums, *copies = arrays
        for array in (weight, x):
            array[:] = self._draw.standard_normal(array.shape, np.float32)
        for array in (sums, *copies):
            array[:] = 7
        first = beside if at_end else 0
        shift = 4 * (first + self._missing)
        addresses = [array.ctypes.data + shift for array in (weight, x, sums)]
        pack_weight(inputs, outputs, addresses[0], whole, copies[0].ctypes.data)
        pack_rows(inputs, rows, addresses[1], whole, copies[1].ctypes.data)
        pointers = (copy.ctypes.data for copy in copies)
        add_product(outputs, rows, inputs, 1.0, *pointers, addresses[2], width)
        expected = np.full(sums.shape, 7.0)
        columns = slice(first, first + inputs)
        product = x[:, columns].astype(np.float64) @ weight[:, columns].T
        expected[:, first : first + outputs] += product
        assert np.abs(sums - expected).max() < 1e-6 * inputs + 1e-5, (rows, outputs, inputs, beside)


def main(core: str, missing: int) -> None:
    pytest.MonkeyPatch().setattr(packed, "BLAS", replace(BLAS, config=core))
    kernels = find_kernels()
    assert kernels is not None
    products, draw = Products(kernels, missing), np.random.default_rng(0)
    for at_end in (True, False):
        # The kernels compute tiles of up to 64 outputs and 24 rows.
        for outputs in (*range(1, 66), 383, 384):
            for rows in (*range(1, 26), 47, 48):
                for inputs in (1, 2, 3, 4, 7, 8, 17):
                    products.check(rows, outputs, inputs, (rows + outputs) % 2 * 3, at_end)
        for _ in range(100):
            rows, outputs, inputs = (int(draw.integers(1, most)) for most in (1000, 385, 385))
            products.check(rows, outputs, inputs, 0, at_end)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
