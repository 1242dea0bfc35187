"""The meaning of MLX's texts for the device."""

import pytest

from gateway.engine.device_faults import classify
from gateway.errors import Fault
from tests.simulated_device import IGNORED, NO_MEMORY, TIMEOUT

METAL = "[METAL] Command buffer execution failed: "
RAISED = [
    (IGNORED, Fault.FATAL),
    (TIMEOUT, Fault.UNKNOWN),
    # There was no full stop before 0.32; the words are those of the system's language.
    (
        f"{METAL}Ignoriert (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)",
        Fault.FATAL,
    ),
    (
        f"{METAL}Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory).",
        Fault.PRESSURE,
    ),
    (
        f"{METAL}Caused GPU Address Fault Error "
        "(0000000b:kIOGPUCommandBufferCallbackErrorPageFault).",
        Fault.UNKNOWN,
    ),
    (f"{METAL}Internal Error (0000000e:Internal Error).", Fault.UNKNOWN),
    (NO_MEMORY.format(1 << 40), Fault.PRESSURE),
    ("[metal::malloc] Resource limit (499000) exceeded.", Fault.PRESSURE),
    (
        "[metal::malloc] Attempting to allocate 99 bytes which is greater than the maximum allowed "
        "buffer size of 9 bytes.",
        Fault.PRESSURE,
    ),
    ("cudaMallocAsync(&data, size, stream) failed: out of memory", Fault.PRESSURE),
    ("cublasLtMatmul( handle_, a, b) failed with code: 3.", Fault.PRESSURE),
    ("cublasLtMatmul( handle_, a, b) failed with code: 13.", Fault.UNKNOWN),
    (
        "cudaGraphLaunch(graph_exec, stream_) failed: an illegal memory access was encountered",
        Fault.FATAL,
    ),
    ("cuLaunchKernelEx(&config, f, p, nullptr) failed: misaligned address", Fault.FATAL),
    ("cudaStreamSynchronize(stream_) failed: unknown error", Fault.UNKNOWN),
    (
        "[quantized_matmul] No implementation for problem shape: 1x2x3x4, transpose: true, "
        'activation: bfloat16, bits: 4, group size: 64, mode: "affine".',
        Fault.ROW,
    ),
    ("SVD has no CUDA implementation.", Fault.ROW),
    ("[quantized_matmul] 1-bit quantization is not supported.", Fault.ROW),
    ("[gather_qmm] Group size 16 is not supported.", Fault.ROW),
    ("[GatherMM::eval] Currently only supports float32.", Fault.ROW),
    ("[metal_kernel] No Metal back-end.", Fault.ROW),
    ("There is no Stream(gpu, 1) in current thread.", Fault.ROW),
    ("[Compile::eval_cpu] Failed to compile function A_1: popen() failed.", Fault.COMPILER),
    ("Could not load C++ shared library /c/libA_1.so: file too short", Fault.COMPILER),
    ("Failed to load compiled mlx_copy kernel: .", Fault.COMPILER),
    ("filesystem error: temp_directory_path: No such file or directory", Fault.COMPILER),
    ("something new", Fault.UNKNOWN),
]


@pytest.mark.parametrize(("text", "fault"), RAISED)
def test_an_errors_text_tells_the_kind_of_fault(text: str, fault: Fault) -> None:
    assert classify(RuntimeError(text)) is fault


@pytest.mark.parametrize("text", [text for text, _ in RAISED])
def test_a_text_inside_another_says_nothing(text: str) -> None:
    """A caller's words may come back in an error of its own; only MLX's begins like this."""
    assert classify(RuntimeError(f"unexpected: {text}")) in (Fault.UNKNOWN, Fault.ROW)
    assert classify(ValueError(text)) is Fault.ROW


@pytest.mark.parametrize("kind", [NotImplementedError, RecursionError, ValueError, KeyError])
def test_a_python_error_of_a_models_code_is_a_fault_of_its_rows(kind: type[Exception]) -> None:
    """Two of them are RuntimeErrors; a model with a bug must not end the process."""
    assert classify(kind("no")) is Fault.ROW


def test_python_out_of_memory_is_pressure() -> None:
    assert classify(MemoryError()) is Fault.PRESSURE
