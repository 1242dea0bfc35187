"""MLX's error messages, and the meaning of each for the device.

MLX raises a RuntimeError for every device error; only the message differs. The messages here are
those of MLX 0.32.4's wheels, and files are named as in its repository,
https://github.com/ml-explore/mlx. A Metal error is raised once, by the next call that waits for the
stream, and the results of the failed work are undefined (mlx/error.h and
mlx/backend/metal/device.cpp). Results of a failed pass are therefore never used.
"""

import re
from typing import Final

from gateway.engine.compiled_code import FAILURES
from gateway.errors import Fault

_METAL: Final = r"\[METAL\] Command buffer execution failed: .*CommandBufferCallbackError"
_CUDA: Final = r"cu[A-Za-z]\w*\(.*\) failed: "


# Pairs of a pattern for the beginning of a message and its meaning; the first match counts.
FAULT_TEXTS: Final = (
    # Metal, mlx/backend/metal/device.cpp. macOS may translate the words before the error's
    # constant, so only the constant is matched.
    # The kernel refuses all further work of this process: omlx #3706, mlx-lm #1572.
    (f"{_METAL}SubmissionsIgnored", Fault.FATAL),
    # Metal works again once memory is free: mlx #3523, mlx-omni-server #59.
    (f"{_METAL}OutOfMemory", Fault.PRESSURE),
    # Any other Metal error. The device may still work or not: two timeouts had no effect before
    # submissions were ignored (omlx #3706, mlx-lm #1572); after a hang or a page fault the GPU is
    # restarted (mlx-vlm #697, #1064); an
    # "innocent victim" error is caused by another process (mlx-openai-server #169); and macOS may
    # end work in favour of drawing the screen (mlx #3267).
    (r"\[METAL\] ", Fault.UNKNOWN),
    # Memory, mlx/backend/{metal,cuda}/allocator.cpp. Too many buffers are alive, which is
    # temporary: mlx #3849, mlx-lm #831, omlx #2535.
    (r"\[metal::malloc\] Resource limit", Fault.PRESSURE),
    # A buffer exceeds Metal's maximum size: with fewer rows, buffers are smaller.
    (r"\[metal::malloc\] Attempting to allocate", Fault.PRESSURE),
    (r"\[malloc\] Unable to allocate", Fault.PRESSURE),
    # cudaErrorMemoryAllocation (2), and CUBLAS_STATUS_ALLOC_FAILED.
    (f"{_CUDA}out of memory", Fault.PRESSURE),
    (r"cublas\w+\(.*\) failed with code: 3\.", Fault.PRESSURE),
    # CUDA, mlx/backend/cuda/utils.cpp. After the errors 226, 700, 702, 710, 714 to 719, 721, 810
    # and 911 the process must be restarted, according to driver_types.h of CUDA 12.9 and 13.
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
            # The errors 214, 220, 709, 201 and 4: the header doesn't say that the process must be
            # restarted, but the CUDA context is lost too.
            "uncorrectable ECC error encountered",
            "uncorrectable NVLink error detected",
            "context is destroyed",
            "invalid device context",
            "driver shutting down",
        )
    ),
    # The device works, but has no kernel for an operation. The messages are from mlx/backend; its
    # folders cpu, metal and cuda word them differently.
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
            r"There is no Stream\(",  # a stream of another thread
            r".*(U|u)nsupported dtype",
        )
    ),
    (FAILURES, Fault.COMPILER),
)
_PATTERNS: Final = [(re.compile(text, re.DOTALL), fault) for text, fault in FAULT_TEXTS]


def classify(error: BaseException) -> Fault:
    """Return an error's meaning for the device.

    Only errors whose type is exactly RuntimeError can come from the device: MLX raises ValueError
    for wrong shapes and dtypes, and Python code may raise a subclass such as NotImplementedError.
    """
    if isinstance(error, MemoryError):
        return Fault.PRESSURE
    if type(error) is not RuntimeError:
        return Fault.ROW
    message = str(error)
    matches = (fault for pattern, fault in _PATTERNS if pattern.match(message))
    return next(matches, Fault.UNKNOWN)
