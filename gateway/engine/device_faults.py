"""The meanings of MLX's error messages for the device.

MLX 0.32.4 (https://github.com/ml-explore/mlx) raises RuntimeError for all device errors, so only
messages tell them apart. After a Metal error, the pass's results are undefined (mlx/error.h).
"""

import re
from typing import Final

from gateway.engine.compiled_code import FAILURES
from gateway.errors import Fault

_METAL: Final = r"\[METAL\] Command buffer execution failed: .*CommandBufferCallbackError"
_CUDA: Final = r"cu[A-Za-z]\w*\(.*\) failed: "


# Patterns of a message's beginning, and their meanings. The first match counts.
FAULT_TEXTS: Final = (
    # Metal, mlx/backend/metal/device.cpp. macOS translates the text, but not the error's constant.
    # After SubmissionsIgnored, the kernel refuses all work of this process: omlx #3706, mlx-lm
    # #1572.
    (f"{_METAL}SubmissionsIgnored", Fault.FATAL),
    # Metal works again once memory is free (mlx #3523, mlx-omni-server #59).
    (f"{_METAL}OutOfMemory", Fault.PRESSURE),
    # After other Metal errors, the device may or may not work: timeouts (omlx #3706, mlx-lm #1572),
    # hangs (mlx-vlm #697, #1064), errors of other processes (mlx-openai-server #169), screen
    # drawing (mlx #3267).
    (r"\[METAL\] ", Fault.UNKNOWN),
    # Memory, mlx/backend/{metal,cuda}/allocator.cpp. Too many buffers are alive for now (mlx #3849,
    # mlx-lm #831, omlx #2535).
    (r"\[metal::malloc\] Resource limit", Fault.PRESSURE),
    # A buffer exceeds Metal's maximum size; fewer rows need smaller buffers.
    (r"\[metal::malloc\] Attempting to allocate", Fault.PRESSURE),
    (r"\[malloc\] Unable to allocate", Fault.PRESSURE),
    # cudaErrorMemoryAllocation (2), and CUBLAS_STATUS_ALLOC_FAILED.
    (f"{_CUDA}out of memory", Fault.PRESSURE),
    (r"cublas\w+\(.*\) failed with code: 3\.", Fault.PRESSURE),
    # CUDA, mlx/backend/cuda/utils.cpp. After these errors the process must be restarted
    # (driver_types.h of CUDA 12.9 and 13): 226, 700, 702, 710, 714 to 719, 721, 810 and 911.
    *(
        (f"{_CUDA}{text}", Fault.FATAL)
        for text in (
            "Invalid access of peer GPU memory over nvlink",
            "an illegal memory access was encountered",
            "the launch timed out and was terminated",
            "device-side assert triggered",
            "hardware stack error",
            "an illegal instruction was encountered",
            "misaligned address",
            "operation not supported on global/shared",
            "invalid program counter",
            "unspecified launch failure",
            "tensor memory not completely freed",
            "the MPS client has been terminated",
            "an async error has occured in external entity",
            # The header demands no restart for 214, 220, 709, 201 and 4, but the CUDA context is
            # lost too.
            "uncorrectable ECC error encountered",
            "uncorrectable NVLink error detected",
            "context is destroyed",
            "invalid device context",
            "driver shutting down",
        )
    ),
    # The device works, but has no kernel for an operation (mlx/backend/cpu, metal and cuda).
    *(
        (text, Fault.ROW)
        for text in (
            r"\[\w+\] No implementation for problem shape",
            r"\[\w+\] (\d+-bit quantization|Group size \d+) is not",
            r"\[GatherMM::eval\] Currently only",
            r"\w+ has no (CUDA|GPU) implementation",
            r"\[.*\].* NYI",
            r"\[gather_mm\] Group count",
            r"\[(metal|cuda)_kernel\] No ",
            r"\[metal::Device\] Unable to (build|load)",
            r"Can not find algorithm for matmul",
            r"There is no Stream\(",
            r".*(U|u)nsupported dtype",
        )
    ),
    (FAILURES, Fault.COMPILER),
)
_PATTERNS: Final = [(re.compile(text, re.DOTALL), fault) for text, fault in FAULT_TEXTS]


def classify(error: BaseException) -> Fault:
    """Return an error's meaning for the device."""
    if isinstance(error, MemoryError):
        return Fault.PRESSURE
    # MLX raises ValueError for wrong shapes, and Python code may raise subclasses.
    if type(error) is not RuntimeError:
        return Fault.ROW
    message = str(error)
    matches = (fault for pattern, fault in _PATTERNS if pattern.match(message))
    return next(matches, Fault.UNKNOWN)
