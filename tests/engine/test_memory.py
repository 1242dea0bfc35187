"""The amount of memory: the least of the limits of machine and control groups."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from gateway.engine import device
from gateway.engine.device import (
    Device,
    Limits,
    active_bytes,
    cached_bytes,
    cgroup_limits,
    clear_cache,
    configure,
    give_back,
    memory_limits,
)

LIMITS = {
    "memory.max": "max\n",
    "a/memory.max": "100\n",
    "a/b/memory.max": "200\n",
    "memory/memory.limit_in_bytes": "1000\n",
    "memory/job/memory.limit_in_bytes": "900\n",
}


@pytest.mark.parametrize(
    ("membership", "limits"),
    [
        ("0::/a/b\n", [200, 100]),
        ("0::/\n", []),
        ("0::/gone/away\n", []),
        ("9:cpu:/x\n4:memory:/job\n0::/\n", [900, 1000]),
        ("4:cpu,memory:/elsewhere\n", [1000]),
        ("1:name=systemd:/\n", []),
    ],
)
def test_limits_are_those_of_the_group_and_of_all_around_it(
    tmp_path: Path, membership: str, limits: list[int]
) -> None:
    """Both versions count; `max` is no limit, nor is a group that cannot be seen from here."""
    for name, text in LIMITS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "membership").write_text(membership)
    assert cgroup_limits(tmp_path, tmp_path / "membership") == limits


def test_where_there_are_no_control_groups_there_are_no_limits(tmp_path: Path) -> None:
    """macOS, for one."""
    assert cgroup_limits(tmp_path, tmp_path / "nothing") == []


MAC = {"max_recommended_working_set_size": 75, "memory_size": 100}


@pytest.mark.parametrize(
    ("device", "info", "cache", "wired", "limits"),
    [
        (Device.METAL, MAC, None, None, Limits(cache=18, wired=None)),
        (Device.METAL, MAC, 0, 0, Limits(cache=0, wired=0)),
        (Device.METAL, MAC, 40, 50, Limits(cache=40, wired=50)),
        (Device.METAL, MAC, None, 90, Limits(cache=18, wired=75)),
        (Device.CUDA, {"total_memory": 100}, None, 50, Limits(cache=None, wired=None)),
        (Device.CUDA, {"total_memory": 100}, 40, None, Limits(cache=40, wired=None)),
        (Device.CPU, {}, 40, 50, Limits(cache=40, wired=None)),
        (Device.CPU, {}, None, None, Limits(cache=None, wired=None)),
    ],
)
def test_memory_is_wired_only_where_asked_for_and_within_bounds(
    device: Device, info: dict[str, int], cache: int | None, wired: int | None, limits: Limits
) -> None:
    assert memory_limits(device, info, cache, wired) == limits


def test_freed_memory_is_given_back_and_arrays_stay() -> None:
    """MLX gives back the freed buffers that it keeps; buffers in use stay."""
    kept = mx.ones((100_000,))
    freed = mx.ones((3_000_000,)) * 2
    mx.eval(kept, freed)
    del freed
    assert cached_bytes() > 0
    give_back()
    assert cached_bytes() == 0
    assert active_bytes() >= kept.nbytes
    assert mx.sum(kept).item() == 100_000


class Recorded:
    """Records the calls that deal with freed buffers."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def clear_cache(self) -> None:
        self.calls.append("clear_cache")


def test_buffers_go_back_when_nothing_is_in_flight() -> None:
    """Otherwise Metal's kernel may panic."""
    recorded = Recorded()
    clear_cache(recorded)
    assert recorded.calls == ["synchronize", "clear_cache"]


def test_one_place_alone_gives_buffers_back_and_one_wires_memory() -> None:
    """A call of MLX's own elsewhere would not wait for work in flight."""
    engine = Path(device.__file__).parent
    texts = {file.name: file.read_text(encoding="utf-8") for file in engine.rglob("*.py")}
    assert [name for name, text in texts.items() if "mx.clear_cache" in text] == []
    assert [name for name, text in texts.items() if "mlx.clear_cache" in text] == ["device.py"]
    assert [name for name, text in texts.items() if "set_wired_limit(" in text] == ["device.py"]


def test_the_limit_on_freed_memory_holds_on_a_cpu(request: pytest.FixtureRequest) -> None:
    before = mx.set_cache_limit(0)
    request.addfinalizer(lambda: mx.set_cache_limit(before))
    give_back()
    configure(Device.CPU, cache_limit_bytes=8_000_000)
    freed = [mx.ones((500_000,)) * times for times in range(10)]
    mx.eval(freed)
    del freed
    assert 0 < cached_bytes() <= 8_000_000
    give_back()


ARENAS = """
import ctypes, os, sys, threading
from gateway.engine.device import prepare_malloc

if sys.argv[1].startswith("prepared"):
    prepare_malloc()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.fopen.restype = ctypes.c_void_p, ctypes.c_void_p
together = threading.Barrier(4)

def work():
    together.wait()
    libc.malloc(ctypes.c_size_t(5_000))
    together.wait()

threads = [threading.Thread(target=work) for _ in range(4)]
for each in threads: each.start()
for each in threads: each.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_info"), reason="glibc's alone has arenas"
)
def test_all_threads_share_one_arena_when_malloc_is_prepared(tmp_path: Path) -> None:
    """Otherwise each has its own, and free memory in one is of no use to another."""
    heaps = {}
    given = {"MALLOC_ARENA_MAX", "GLIBC_TUNABLES"}
    clean = {name: value for name, value in os.environ.items() if name not in given}
    for how in ("prepared", "as it is", "prepared, as an operator wants it"):
        told = tmp_path / how
        more = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=3"} if "operator" in how else {}
        command = [sys.executable, "-c", ARENAS, how, str(told)]
        subprocess.run(command, check=True, env={**clean, **more})
        heaps[how] = told.read_text().count("<heap nr=")
    assert heaps["prepared"] == 1 < heaps["as it is"], heaps
    assert heaps["prepared, as an operator wants it"] > 1, heaps
