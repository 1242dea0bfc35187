"""MLX's errors when its device fails, and the meaning of each text.

MLX has one exception for all: RuntimeError, with a text. Texts are those of MLX 0.32.4's wheels;
files are named as in its repository, https://github.com/ml-explore/mlx. An error of Metal is raised
once, by the next call that waits for the stream, and the results of the failed work are unwritten
(mlx/error.h, mlx/backend/metal/device.cpp): so nothing of a pass that raised is used again.
"""

import re
from typing import Final

from gateway.engine.compiled_code import FAILURES
from gateway.errors import Fault

_METAL: Final = r"\[METAL\] Command buffer execution failed: .*CommandBufferCallbackError"
_CUDA: Final = r"cu[A-Za-z]\w*\(.*\) failed: "


# Pairs of the beginning of a text and its meaning for the device; the first that fits counts.
FAULT_TEXTS: Final = (
    # Metal, mlx/backend/metal/device.cpp. Words in front of a constant may be localised.
    # The kernel refuses this process alone, until it ends: omlx #3706, mlx-lm #1572.
    (f"{_METAL}SubmissionsIgnored", Fault.FATAL),
    # This error goes away once memory is free: mlx #3523, mlx-omni-server #59.
    (f"{_METAL}OutOfMemory", Fault.PRESSURE),
    # Any other error of Metal. A timeout was absorbed twice, then submissions were ignored (omlx
    # #3706, mlx-lm #1572); after a hang or a page fault the GPU is restarted (mlx-vlm #697, #1064);
    # an innocent victim is another's fault (mlx-openai-server #169); or macOS preferred the screen
    # (mlx #3267).
    (r"\[METAL\] ", Fault.UNKNOWN),
    # Memory, mlx/backend/{metal,cuda}/allocator.cpp. Too many buffers are alive, which passes: mlx
    # #3849, mlx-lm #831, omlx #2535.
    (r"\[metal::malloc\] Resource limit", Fault.PRESSURE),
    # One buffer is larger than Metal's largest: fewer rows have smaller ones.
    (r"\[metal::malloc\] Attempting to allocate", Fault.PRESSURE),
    (r"\[malloc\] Unable to allocate", Fault.PRESSURE),
    # cudaErrorMemoryAllocation (2), and CUBLAS_STATUS_ALLOC_FAILED.
    (f"{_CUDA}out of memory", Fault.PRESSURE),
    (r"cublas\w+\(.*\) failed with code: 3\.", Fault.PRESSURE),
    # CUDA, mlx/backend/cuda/utils.cpp. For the errors 226, 700, 702, 710, 714 to 719, 721, 810 and
    # 911, driver_types.h of CUDA 12.9 and 13 says that the process must be ended and started again.
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
            # The header does not say so for 214, 220, 709, 201 and 4, but their context is gone.
            "uncorrectable ECC error encountered",
            "uncorrectable NVLink error detected",
            "context is destroyed",
            "invalid device context",
            "driver shutting down",
        )
    ),
    # The requested operation has no kernel: the device is well. The texts are from mlx/backend, in
    # its folders' own words.
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
            r"There is no Stream\(",  # the stream belongs to another thread
            r".*(U|u)nsupported dtype",
        )
    ),
    (FAILURES, Fault.COMPILER),
)
_PATTERNS: Final = [(re.compile(text, re.DOTALL), fault) for text, fault in FAULT_TEXTS]


def classify(error: BaseException) -> Fault:
    """Return an error's meaning for the device.

    Only a RuntimeError itself can be the device's: MLX raises ValueError for shapes and types, and
    Python raises others, such as NotImplementedError, which is a RuntimeError too.
    """
    if isinstance(error, MemoryError):
        return Fault.PRESSURE
    if type(error) is not RuntimeError:
        return Fault.ROW
    message = str(error)
    matches = (fault for pattern, fault in _PATTERNS if pattern.match(message))
    return next(matches, Fault.UNKNOWN)
