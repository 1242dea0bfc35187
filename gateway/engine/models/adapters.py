"""LoRA adapters of one model, several in one pass: https://arxiv.org/abs/2106.09685.

A projection computes x W + (x A) B for each row, with the factors A and B of the row's adapter.
Everything here must run on the lane.
"""

import contextlib
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx.utils import tree_unflatten

from gateway.engine.device import evaluate
from gateway.engine.models.checkpoint import SLICE_BYTES, Checkpoint
from gateway.engine.models.decoders import floating_dtype
from gateway.engine.models.folder import Tensor, join_names
from gateway.engine.models.missing_kernels import can_gather, dimensions
from gateway.jobs.chat import Adapter

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapters.safetensors"
_PEFT_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")
_DTYPES: Final = ("F32", "F16", "BF16")
_FACTORS: Final = ("lora_a", "lora_b")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter's config, and the header of its weights."""

    folder: Checkpoint  # its errors name the adapter
    rank: int
    scale: float
    # The shapes of lora_a and lora_b, by the adapted module's name.
    shapes: Mapping[str, tuple[Shape, Shape]]

    @property
    def weights(self) -> int:
        return sum(math.prod(shape) for both in self.shapes.values() for shape in both)

    def factors(self) -> dict[str, tuple[mx.array, mx.array]]:
        """Return each module's factors, which are read when evaluated."""
        with self.folder.blame():
            arrays = mx.load(str(self.folder.folder / WEIGHTS))
            assert isinstance(arrays, dict)
            return {
                module: (arrays[f"{module}.lora_a"], arrays[f"{module}.lora_b"])
                for module in self.shapes
            }


def read_adapter(name: str, folder: Path) -> AdapterFiles:
    """Read an adapter's config and the header of its weights. Raises ModelLoadFailed."""
    files = Checkpoint(name, folder)
    if not (folder / WEIGHTS).is_file():
        if any((folder / file).is_file() for file in _PEFT_WEIGHTS):
            raise files.failed(
                f"{folder} has an adapter in PEFT's format; only mlx-lm's is supported, with "
                f"its weights in {WEIGHTS}"
            )
        raise files.failed(f"no {WEIGHTS} in {folder}")
    config = files.read_object(CONFIG)
    if not config:
        raise files.failed(f"no {CONFIG} in {folder}")
    rank, scale = _read_config(files, config)
    return AdapterFiles(files, rank, scale, _pair(files, files.header(WEIGHTS), rank))


def _read_config(files: Checkpoint, config: Mapping[str, Any]) -> tuple[int, float]:
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise files.failed(f"{CONFIG} has fine_tune_type {kind!r}; only 'lora' is served")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, Mapping):
        raise files.failed(f"{CONFIG} has no lora_parameters")
    rank: object = parameters.get("rank")
    scale: object = parameters.get("scale")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise files.failed(f"{CONFIG} has the rank {rank!r}, not a whole number from 1 on")
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not math.isfinite(scale):
        raise files.failed(f"{CONFIG} has the scale {scale!r}, not a number")
    return rank, float(scale)


def _pair(
    files: Checkpoint, tensors: Mapping[str, Tensor], rank: int
) -> dict[str, tuple[Shape, Shape]]:
    if not tensors:
        raise files.failed(f"{WEIGHTS} has no weights")
    unknown = [name for name in tensors if name.rpartition(".")[2] not in _FACTORS]
    if unknown:
        is_dora = any(name.endswith(".m") for name in unknown)
        kind = "DoRA's magnitudes" if is_dora else "weights that are neither lora_a nor lora_b"
        raise files.failed(f"{WEIGHTS} has {kind}: {join_names(unknown)}")
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise files.failed(f"{name} is of type {tensor.dtype}, not F32, F16 or BF16")
        if len(tensor.shape) != 2 or not all(type(n) is int and n > 0 for n in tensor.shape):
            raise files.failed(
                f"{name} is {tensor.shape}, not a matrix: only linear projections are adapted"
            )
        rows, columns = tensor.shape
        expected = (rows, rank) if name.endswith(".lora_a") else (rank, columns)
        if tensor.shape != expected:
            raise files.failed(
                f"{name} is {tensor.shape}, not {expected}, as the rank in {CONFIG} is {rank}"
            )
    modules = {name.rpartition(".")[0] for name in tensors}
    names = [f"{module}.{factor}" for module in sorted(modules) for factor in _FACTORS]
    missing = [name for name in names if name not in tensors]
    if missing:
        raise files.failed(f"{WEIGHTS} lacks {join_names(missing)}")
    return {
        module: (tensors[f"{module}.lora_a"].shape, tensors[f"{module}.lora_b"].shape)
        for module in sorted(modules)
    }


NONE: Final = 0  # the number for no adapter

_Module: Any = Module  # untyped in mlx's stubs


@dataclass(frozen=True, slots=True)
class _Places:
    """The places in a stack that the rows of a pass need."""

    only: int | None  # the place, if all rows have the same adapter
    index: mx.array  # (rows,)
    # (rows, 1, 1) bool: True for rows whose adapter is in the stack. None means all rows.
    mask: mx.array | None


class _Rows:
    """The adapters of a pass's rows."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.numbers = numbers
        self._found: dict[tuple[int, ...], _Places | None] = {}

    def find(self, numbers: tuple[int, ...]) -> _Places | None:
        """Return the places of the rows' adapters in a stack; None if the stack has none."""
        if numbers not in self._found:
            self._found[numbers] = self._look_up(numbers)
        return self._found[numbers]

    def _look_up(self, numbers: tuple[int, ...]) -> _Places | None:
        place_of = {number: place for place, number in enumerate(numbers)}
        if place_of.keys().isdisjoint(self.numbers):
            return None
        index = mx.array([place_of.get(number, 0) for number in self.numbers])
        mask = only = None
        if not place_of.keys() >= set(self.numbers):
            mask = mx.array([number in place_of for number in self.numbers])[:, None, None]
        elif len(set(self.numbers)) == 1:
            only = place_of[self.numbers[0]]
        return _Places(only, index, mask)


class _Pass:
    """The current pass, as the model's adapted modules share it."""

    def __init__(self) -> None:
        self.rows: _Rows | None = None  # None without adapters
        self.gathers = False  # True if mx.gather_mm supports the factors' type


class _Stack(_Module):  # type: ignore[misc]
    """A module's factors for all adapters of the same rank.

    `lora_a` is (adapters, in, rank), `lora_b` is (adapters, rank, out).
    """

    def __init__(self, numbers: Sequence[int], lora_a: mx.array, lora_b: mx.array) -> None:
        super().__init__()
        evaluate(lora_a, lora_b)
        self.lora_a, self.lora_b = lora_a, lora_b
        self.numbers = tuple(numbers)

    @property
    def nbytes(self) -> int:
        return int(self.lora_a.nbytes + self.lora_b.nbytes)

    def plus(self, other: "_Stack") -> "_Stack":
        return _Stack(
            (*self.numbers, *other.numbers),
            mx.concatenate([self.lora_a, other.lora_a]),
            mx.concatenate([self.lora_b, other.lora_b]),
        )

    def without(self, number: int) -> "_Stack | None":
        numbers = [other for other in self.numbers if other != number]
        if not numbers:
            return None
        at = mx.array([self.numbers.index(other) for other in numbers])
        return _Stack(numbers, self.lora_a[at], self.lora_b[at])

    def multiply(self, x: mx.array, places: _Places, *, gathers: bool) -> mx.array:
        """Return (x A) B for x, (rows, …, in); zeros for rows whose adapter is not in the stack."""
        if places.only is not None:
            product: mx.array = (x @ self.lora_a[places.only]) @ self.lora_b[places.only]
            return product
        count = places.index.shape[0]
        # Some models put rows and tokens in one dimension, rows first.
        if x.ndim > 2 and x.shape[0] != count:
            raise ValueError(f"{x.shape} does not have {count} rows, one for each adapter number")
        by_row = x.reshape(count, -1, x.shape[-1])
        inner = _multiply(by_row, self.lora_a, places.index, gathers=gathers)
        if places.mask is not None:
            inner = mx.where(places.mask, inner, mx.zeros_like(inner))
        added = _multiply(inner, self.lora_b, places.index, gathers=gathers)
        return added.reshape(*x.shape[:-1], -1)


class AdaptedLinear(_Module):  # type: ignore[misc]
    """A linear projection with the factors of the adapters that change it."""

    def __init__(self, linear: Any, current: _Pass) -> None:
        super().__init__()
        self.linear = linear
        self.stacks: list[_Stack] = []
        self._current = current

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks)

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.linear(x)
        rows = self._current.rows
        if rows is None:
            return y
        for stack in self.stacks:
            places = rows.find(stack.numbers)
            if places is not None:
                added = stack.multiply(x, places, gathers=self._current.gathers)
                y = y + added.astype(y.dtype)
        return y

    def add(self, number: int, lora_a: mx.array, lora_b: mx.array) -> None:
        new, rank = _Stack([number], lora_a[None], lora_b[None]), lora_a.shape[1]
        for i, stack in enumerate(self.stacks):
            if stack.lora_a.shape[2] == rank:
                self.stacks[i] = stack.plus(new)
                return
        self.stacks.append(new)

    def drop(self, number: int) -> None:
        for i, stack in enumerate(self.stacks):
            if number in stack.numbers:
                rest = stack.without(number)
                self.stacks[i : i + 1] = [] if rest is None else [rest]
                return


class Adapters:
    """The adapters of a model. No number is used twice."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._current = _Pass()
        self._modules: dict[str, AdaptedLinear] = {}
        self._last = NONE
        self._rows = _Rows(())
        self.dtype = floating_dtype(model)

    @contextlib.contextmanager
    def applied(self, numbers: Sequence[int]) -> Iterator[None]:
        """While entered, row i uses the adapter `numbers[i]`; NONE means the base model alone."""
        if any(numbers):
            if self._rows.numbers != tuple(numbers):
                self._rows = _Rows(tuple(numbers))
            self._current.rows = self._rows
        try:
            yield
        finally:
            self._current.rows = None

    def add_in_steps(self, files: AdapterFiles) -> Generator[Adapter | None]:
        """Read and add an adapter, some modules per step; the last step yields the Adapter.

        Passes may run between steps. Raises ModelLoadFailed for an adapter that doesn't fit. After
        an error or an early close, nothing of the adapter is left in the model.
        """
        if not self._modules:
            self._current.gathers = can_gather(self.dtype)
        self._last += 1
        number, added, read = self._last, 0, 0
        try:
            linears = self._find_linears(files)
            for path, factors in files.factors().items():
                lora_a, lora_b = _prepare(files, path, factors, self.dtype)
                module = self._adapted(path, linears[path])
                before = module.nbytes
                module.add(number, lora_a, lora_b)
                added += module.nbytes - before
                read += lora_a.nbytes + lora_b.nbytes
                if read > SLICE_BYTES:
                    read = 0
                    yield None
        except BaseException:
            self.drop(number)
            raise
        yield Adapter(number, files.folder.name, added)

    def drop(self, number: int) -> None:
        for path, module in list(self._modules.items()):
            module.drop(number)
            if not module.stacks:
                self._put(path, module.linear)
                del self._modules[path]

    def close(self) -> None:
        self._model = None
        self._modules.clear()

    def _adapted(self, path: str, linear: Any) -> AdaptedLinear:
        if path not in self._modules:
            self._modules[path] = AdaptedLinear(linear, self._current)
            self._put(path, self._modules[path])
        return self._modules[path]

    def _put(self, path: str, module: Any) -> None:
        self._model.update_modules(tree_unflatten([(path, module)]))

    def _find_linears(self, files: AdapterFiles) -> dict[str, Any]:
        """Return the projections that an adapter changes, after checking that it fits them."""
        failed = files.folder.failed
        named: dict[str, Any] = dict(self._model.named_modules())
        named |= {path: module.linear for path, module in self._modules.items()}
        for path, (shape_a, shape_b) in files.shapes.items():
            linear = named.get(path)
            if linear is None:
                raise failed(f"it has {path}.lora_a, but its base has no {path}")
            if type(linear) not in (Linear, QuantizedLinear):
                raise failed(f"{path} is no linear projection in its base: {type(linear).__name__}")
            columns, rows = dimensions(linear)
            expected: dict[str, tuple[Shape, Shape]] = {
                "lora_a": (shape_a, (columns, files.rank)),
                "lora_b": (shape_b, (files.rank, rows)),
            }
            for factor, (shape, expected_shape) in expected.items():
                if shape != expected_shape:
                    raise failed(f"{path}.{factor} is {shape}, but its base needs {expected_shape}")
            if files.rank > min(columns, rows):
                raise failed(
                    f"its rank, {files.rank}, is larger than a dimension of {path}, which is "
                    f"{columns} by {rows}"
                )
        return {path: named[path] for path in files.shapes}


def _prepare(
    files: AdapterFiles, path: str, factors: tuple[mx.array, mx.array], dtype: mx.Dtype
) -> tuple[mx.array, mx.array]:
    with files.folder.blame():
        lora_a = factors[0].astype(dtype)
        lora_b = (factors[1].astype(mx.float32) * files.scale).astype(dtype)
        mx.eval(lora_a, lora_b)
    for name, factor in (("lora_a", lora_a), ("lora_b", lora_b)):
        if not mx.isfinite(factor).all().item():
            raise files.folder.failed(f"{path}.{name} has values that are not finite as {dtype}")
    return lora_a, lora_b


def _multiply(x: mx.array, factors: mx.array, index: mx.array, *, gathers: bool) -> mx.array:
    if not gathers:
        return x @ factors[index]
    product: mx.array = mx.gather_mm(x, factors, rhs_indices=index)
    return product
