"""Device, dtype and memory limits: chosen once, on the thread that will use mlx.

The package has seen to it that OpenBLAS is there before mlx is.
"""

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import mlx.core as mx

from gateway.engine.blas import BLAS as BLAS
from gateway.engine.blas import OPENBLAS


class Device(StrEnum):
    """Where the maths runs."""

    CPU = "cpu"
    METAL = "metal"
    CUDA = "cuda"


def choose_device(requested: str) -> Device:
    """Turn `auto`, `cpu` or `gpu` into the device to use; ValueError when it is not there."""
    # https://ml-explore.github.io/mlx/build/html/python/metal.html: on a build without the
    # back end the modules are there and is_available() is false.
    metal, cuda = mx.metal.is_available(), mx.cuda.is_available()
    if requested == "cpu":
        return Device.CPU
    if requested == "gpu" and not (metal or cuda):
        raise ValueError("device `gpu` was asked for, but this mlx sees neither Metal nor CUDA")
    if requested not in ("auto", "gpu"):
        raise ValueError(f"device must be auto, cpu or gpu, not `{requested}`")
    if metal:
        return Device.METAL
    return Device.CUDA if cuda else Device.CPU


_DTYPES: Final = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def pick_dtype(device: Device, requested: str | None, checkpoint: mx.Dtype) -> mx.Dtype:
    """Choose the dtype to compute in.

    On the CPU half precision runs 10 to 50 times slower than float32, so float32 is taken
    unless another is asked for. A GPU keeps what the checkpoint holds.
    """
    if requested is not None:
        if requested not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, not `{requested}`")
        return _DTYPES[requested]
    return mx.float32 if device is Device.CPU else checkpoint


def configure(
    device: Device, cache_limit_bytes: int | None = None, wired_limit_bytes: int | None = None
) -> None:
    """Set the default device and the memory limits. Once, on the thread that will use mlx.

    The thread matters: mlx keeps its default device and streams per thread.
    """
    mx.set_default_device(mx.Device(mx.cpu if device is Device.CPU else mx.gpu, 0))
    info = {} if device is Device.CPU else mx.device_info()
    limits = memory_limits(device, info, cache_limit_bytes, wired_limit_bytes)
    if limits.wired is not None:
        mx.set_wired_limit(limits.wired)
    if limits.cache is not None:
        mx.set_cache_limit(limits.cache)


@dataclass(frozen=True, slots=True)
class Limits:
    """What mlx is told of memory, bytes; None leaves its own choice."""

    cache: int | None
    wired: int | None


def memory_limits(
    device: Device, info: Mapping[str, object], cache: int | None, wired: int | None
) -> Limits:
    """Choose from what was asked for; `info` is mlx's device_info of a GPU, nothing of a CPU."""
    most = info.get("max_recommended_working_set_size")
    if device is not Device.METAL or not isinstance(most, int):
        return Limits(cache, None)
    # https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.set_wired_limit.html
    # Without a wish nothing is wired: streams side by side over a prompt cache that churns, which
    # is what runs here, panicked macOS's kernel within two minutes with wired memory, and not in
    # four hours without (https://github.com/ml-explore/mlx/issues/3186, mlx-lm's 1666). More than
    # recommended is an error.
    wired = None if wired is None else min(wired, most)
    # MLX itself gives buffers back while others are in flight, which was seen to panic too (mlx
    # #3346), as soon as more are kept than this, or all memory is used. So the limit is what
    # models' budget leaves by default, and `give_back` empties the cache long before.
    cache = most // 4 if cache is None else cache
    return Limits(cache, wired)


_KNOWN_BY: Final = (
    *("device_name", "architecture", "compute_capability_major", "compute_capability_minor"),
    *("max_recommended_working_set_size", "memory_size", "total_memory"),
)


def device_facts(device: Device) -> dict[str, str | int]:
    """Return what mlx says of a device, and nothing that tells one from another of its make."""
    info = mx.device_info(mx.Device(mx.cpu if device is Device.CPU else mx.gpu, 0))
    return {name: info[name] for name in _KNOWN_BY if name in info}


def leave() -> None:
    """Give up this thread's streams, as its last act: without it about half of all exits abort."""
    mx.clear_streams()


def cpu_threads() -> int:
    """Count the cores OpenBLAS uses, or those this process may use."""
    if OPENBLAS is not None:
        return max(1, int(OPENBLAS.openblas_get_num_threads()))
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_own = threading.local()


def cpu_streams(count: int) -> list[mx.Stream]:
    """Give `count` CPU streams of this thread, made once: each is a thread of mlx."""
    made: list[mx.Stream] = _own.__dict__.setdefault("streams", [])
    while len(made) < count:
        made.append(mx.new_stream(mx.Device(mx.cpu, 0)))
    return made[:count]


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """Keep OpenBLAS to one thread per call, while several streams call it side by side."""
    if OPENBLAS is None:
        yield
        return
    threads = cpu_threads()
    OPENBLAS.openblas_set_num_threads(1)
    try:
        yield
    finally:
        OPENBLAS.openblas_set_num_threads(threads)
