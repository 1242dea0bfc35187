import subprocess
import sys
import threading

import mlx.core as mx
import pytest

from gateway.engine import device
from gateway.engine.device import Device, choose_device, pick_dtype

linux = pytest.mark.skipif(sys.platform != "linux", reason="OpenBLAS is interposed on Linux only")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


@linux
@pytest.mark.skipif(not device.BLAS.loaded, reason="no OpenBLAS here")
def test_importing_mlx_first_is_told() -> None:
    """OpenBLAS loaded after mlx changes nothing, so the finding does not claim it."""
    finding = run("import mlx.core\nfrom gateway.engine import device\nprint(device.BLAS)")
    assert "loaded=False" in finding
    assert "too late" in finding


@linux
def test_importing_any_engine_module_loads_blas_before_mlx() -> None:
    """The package's own __init__ sees to the order, whichever module is asked for first."""
    out = run(
        "from gateway.engine.embedding import pooling\n"
        "from gateway.engine import device\n"
        "print('too late' in str(device.BLAS))"
    )
    assert out.strip() == "False"


@pytest.mark.parametrize(
    ("device", "requested", "checkpoint", "picked"),
    [
        (Device.CPU, None, mx.float16, mx.float32),
        (Device.CPU, None, mx.bfloat16, mx.float32),
        (Device.CPU, "bfloat16", mx.float32, mx.bfloat16),
        (Device.METAL, None, mx.float16, mx.float16),
        (Device.CUDA, None, mx.bfloat16, mx.bfloat16),
        (Device.METAL, "float32", mx.float16, mx.float32),
    ],
)
def test_cpu_computes_in_float32_unless_asked(
    device: Device, requested: str | None, checkpoint: mx.Dtype, picked: mx.Dtype
) -> None:
    """Half precision is slow on a CPU; a GPU keeps the checkpoint's dtype."""
    assert pick_dtype(device, requested, checkpoint) == picked


def test_an_unknown_dtype_or_device_is_refused() -> None:
    with pytest.raises(ValueError, match="float32, float16, bfloat16"):
        pick_dtype(Device.CPU, "int4", mx.float32)
    with pytest.raises(ValueError, match="auto, cpu or gpu"):
        choose_device("tpu")


def test_a_gpu_asked_for_is_never_silently_the_cpu() -> None:
    assert choose_device("cpu") is Device.CPU
    if mx.metal.is_available() or mx.cuda.is_available():
        assert choose_device("gpu") is choose_device("auto") is not Device.CPU
    else:
        assert choose_device("auto") is Device.CPU
        with pytest.raises(ValueError, match="neither Metal nor CUDA"):
            choose_device("gpu")


def test_streams_are_made_once_for_each_thread() -> None:
    """A stream works only on the thread that made it, and each costs a thread of mlx."""
    mine = device.cpu_streams(2)
    assert device.cpu_streams(2) == mine
    assert device.cpu_streams(1) == mine[:1]
    theirs: list[mx.Stream] = []

    def work() -> None:
        theirs.extend(device.cpu_streams(1))
        with mx.stream(theirs[0]):
            mx.eval(mx.ones(3) + 1)
        mx.clear_streams()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert theirs[0] not in mine


def test_blas_threads_come_back_after_single_threaded_work() -> None:
    before = device.cpu_threads()
    inside: list[int] = []

    def fail() -> None:
        with device.single_threaded_blas():
            inside.append(device.cpu_threads())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert inside == [1 if device.BLAS.loaded else before]
    assert device.cpu_threads() == before


LIMITS_TAKEN = """
import importlib, resource
from gateway.engine.device import keep_file_limits
for limits in ((3000, 4000), (512, 4000), (512, 1000)):
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with keep_file_limits():
        import mlx_lm.utils
        if limits[0] == 512:
            importlib.reload(mlx_lm.utils)
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 200
"""


def test_mlx_lm_only_raises_the_limit_of_open_files() -> None:
    """It sets 2048 of 4096 where it is imported: lower than a supervisor's, or an error."""
    assert run(LIMITS_TAKEN).splitlines() == ["3000 4000", "2048 4000", "1000 1000"]
