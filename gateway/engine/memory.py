"""How much memory there is to compute in, how much of it is used, and how it is given back."""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import mlx.core as mx

from gateway.engine.backend import Device

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def memory_bytes(device: Device) -> int:
    """Count the bytes that models may be computed in, before anything is taken.

    On Metal the working set it recommends, on CUDA the device's memory, on a CPU the machine's
    or, where that is less, what the control group of this process may have.
    """
    info = mx.device_info() if device is not Device.CPU else {}
    # https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.device_info.html
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if offered := int(info.get(key, 0)):
            return offered
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *cgroup_limits(_CGROUPS, _MEMBERSHIP)])


def active_bytes() -> int:
    """Count the bytes of arrays there are now. Safe on any thread."""
    return mx.get_active_memory()


def cached_bytes() -> int:
    """Count the bytes that were freed and are kept for reuse. Safe on any thread."""
    return mx.get_cache_memory()


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_MMAP_ABOVE, _TRIM_ABOVE = 32 << 20, 512 << 20


def prepare_malloc() -> None:
    """Make glibc's malloc, of which mlx's buffers are on a CPU, fit for them. Before any thread.

    Freed buffers are kept: by default each of a few MB is mapped anew and its pages are faulted in
    one by one, and GELU over 6 MB took 18 ms instead of 4. All threads share one arena, since what
    is free in one thread's is of no use to the others: with an arena each, the mixed load of
    tests/provoked/test_soak.py held 358 MB instead of 312, and answered as many requests.
    """
    if (mallopt := _of_glibc("mallopt")) is None:
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_ABOVE)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_ABOVE)
    # https://www.gnu.org/software/libc/manual/html_node/Memory-Allocation-Tunables.html
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if not ("MALLOC_ARENA_MAX" in os.environ or "glibc.malloc.arena" in tunables):
        mallopt(_M_ARENA_MAX, 1)


class FreedBuffers(Protocol):
    """What MLX does with freed buffers; the module itself, or a test's record of calls."""

    def synchronize(self) -> None:
        """Wait until nothing is in flight."""

    def clear_cache(self) -> None:
        """Give every freed buffer back."""


def clear_cache(mlx: FreedBuffers = mx) -> None:
    """Give freed buffers back, once nothing is in flight. On the lane only.

    The one place that does: a buffer that goes back to Metal while others are in flight can panic
    the kernel (https://github.com/ml-explore/mlx/issues/3346 and 3186).
    """
    mlx.synchronize()
    mlx.clear_cache()


def give_back() -> None:
    """Give freed memory back to the system. On the lane only.

    What is kept saves faults, but a process that never gives any back only grows, to its worst
    moment. On a CPU it took 4 to 14 ms under a load of embeddings; once, after prompts of 5,000
    tokens, 58, and 752 MB became 449.
    """
    clear_cache()
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Find a function of malloc.h that glibc has and other libraries, musl for one, do not."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def cgroup_limits(groups: Path, membership: Path) -> list[int]:
    """Read the limits, in bytes, of a process's control group and of those around it.

    https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.max) and
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html (memory.limit_in_bytes).
    """
    found = [_number(file) for file in _limit_files(groups, membership)]
    return [limit for limit in found if limit is not None]


def _limit_files(groups: Path, membership: Path) -> Iterator[Path]:
    """Name every file that may hold a limit: inside a container a group's path is often /."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        own = root / path.lstrip("/")
        yield from (folder / name for folder in (own, *own.parents) if folder.is_relative_to(root))


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no such group here, or "max"
        return None
