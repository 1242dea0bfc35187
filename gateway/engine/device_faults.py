"""What MLX raises when its device fails, and what each text says of the device.

MLX has one exception for all: RuntimeError, with a text. Texts are those of MLX 0.32.4's wheels;
files are named as in its repository, https://github.com/ml-explore/mlx. An error of Metal is raised
once, by whatever waits for the stream next, and what the failed work was to write is unwritten
(mlx/error.h, mlx/backend/metal/device.cpp): so nothing of a pass that raised is used again.
"""

import re
from dataclasses import dataclass
from typing import Final

from gateway.errors import Fault

_METAL: Final = r"\[METAL\] Command buffer execution failed: .*CommandBufferCallbackError"
_CUDA: Final = r"cu[A-Za-z]\w*\(.*\) failed: "


@dataclass(frozen=True, slots=True)
class FaultText:
    """A pattern that a text begins with, what it says of the device, and where that is known
    from.
    """

    pattern: str
    fault: Fault
    source: str


FAULT_TEXTS: Final = (
    # Metal, mlx/backend/metal/device.cpp. Words in front of a constant may be localised.
    *(
        FaultText(f"{_METAL}{name}", fault, source)
        for name, fault, source in (
            # The kernel refuses this process alone, until it ends.
            ("SubmissionsIgnored", Fault.FATAL, "omlx #3706, mlx-lm #1572"),
            # Goes by once memory is free.
            ("OutOfMemory", Fault.PRESSURE, "mlx #3523, mlx-omni-server #59"),
            # Absorbed twice, then submissions were ignored.
            ("Timeout", Fault.UNKNOWN, "omlx #3706, mlx-lm #1572"),
            ("Hang", Fault.UNKNOWN, "The GPU is restarted: mlx-vlm #1064"),
            ("PageFault", Fault.UNKNOWN, "The GPU is restarted: mlx-vlm #697, #1064"),
            ("InnocentVictim", Fault.UNKNOWN, "Another's fault: mlx-openai-server #169"),
            # macOS prefers the screen.
            ("ImpactingInteractivity", Fault.UNKNOWN, "mlx #3267, MTPLX #422"),
        )
    ),
    FaultText(r"\[METAL\] ", Fault.UNKNOWN, "Any other: mlx/backend/metal/device.cpp"),
    # Memory, mlx/backend/{metal,cuda}/allocator.cpp.
    FaultText(
        r"\[metal::malloc\] Resource limit",
        Fault.PRESSURE,
        "So many buffers are alive; goes by: mlx #3849, mlx-lm #831, omlx #2535",
    ),
    FaultText(
        r"\[metal::malloc\] Attempting to allocate",
        Fault.PRESSURE,
        "One buffer is larger than Metal's largest: fewer rows have smaller ones",
    ),
    FaultText(r"\[malloc\] Unable to allocate", Fault.PRESSURE, "Metal and CUDA"),
    FaultText(f"{_CUDA}out of memory", Fault.PRESSURE, "cudaErrorMemoryAllocation (2)"),
    FaultText(
        r"cublas\w+\(.*\) failed with code: 3\.",
        Fault.PRESSURE,
        "CUBLAS_STATUS_ALLOC_FAILED: mlx/backend/cuda/cublas_utils.cpp",
    ),
    # CUDA, mlx/backend/cuda/utils.cpp. Of these, driver_types.h of CUDA 12.9 and 13 says that the
    # process must be ended and started again to go on.
    *(
        FaultText(f"{_CUDA}{text}", Fault.FATAL, f"driver_types.h: {name}")
        for name, text in (
            ("cudaErrorContained (226)", "Invalid access of peer GPU memory over nvlink"),
            ("cudaErrorIllegalAddress (700)", "an illegal memory access was encountered"),
            ("cudaErrorLaunchTimeout (702)", "the launch timed out and was terminated"),
            ("cudaErrorAssert (710)", "device-side assert triggered"),
            ("cudaErrorHardwareStackError (714)", "hardware stack error"),
            ("cudaErrorIllegalInstruction (715)", "an illegal instruction was encountered"),
            ("cudaErrorMisalignedAddress (716)", "misaligned address"),
            ("cudaErrorInvalidAddressSpace (717)", "operation not supported on global/shared"),
            ("cudaErrorInvalidPc (718)", "invalid program counter"),
            ("cudaErrorLaunchFailure (719)", "unspecified launch failure"),
            ("cudaErrorTensorMemoryLeak (721)", "tensor memory not completely freed"),
            ("cudaErrorMpsClientTerminated (810)", "the MPS client has been terminated"),
            ("cudaErrorExternalDevice (911)", "an async error has occured in external entity"),
        )
    ),
    # Of these it does not say so, but the context they are of is gone.
    *(
        FaultText(f"{_CUDA}{text}", Fault.FATAL, f"driver_types.h: {name}, by its meaning")
        for name, text in (
            ("cudaErrorECCUncorrectable (214)", "uncorrectable ECC error encountered"),
            ("cudaErrorNvlinkUncorrectable (220)", "uncorrectable NVLink error detected"),
            ("cudaErrorContextIsDestroyed (709)", "context is destroyed"),
            ("cudaErrorDeviceUninitialized (201)", "invalid device context"),
            ("cudaErrorCudartUnloading (4)", "driver shutting down"),
        )
    ),
    # What was asked has no kernel: the device is well.
    *(
        FaultText(pattern, Fault.ROW, source)
        for pattern, source in (
            (r"\[\w+\] No implementation for problem shape", "mlx/backend/cuda/quantized"),
            (r"\[\w+\] (\d+-bit quantization|Group size \d+) is not", "mlx/backend/cuda/quantized"),
            (r"\[GatherMM::eval\] Currently only", "mlx/backend/cpu/gather_mm.cpp: float32 alone"),
            (r"\w+ has no (CUDA|GPU) implementation", "mlx/backend/{cuda,no_gpu}/primitives.cpp"),
            (r"\[.*\].* NYI", "mlx/backend/metal/primitives.cpp"),
            (r"\[gather_mm\] Group count", "mlx/backend/cuda/gemms/grouped_gemm_unaligned.cu"),
            (r"\[(metal|cuda)_kernel\] No ", "mlx/backend/common/metal_kernel.cpp"),
            (r"\[metal::Device\] Unable to (build|load)", "mlx/backend/metal/device.cpp"),
            (r"Can not find algorithm for matmul", "mlx/backend/cuda/gemms/cublas_utils.cpp"),
            (r"There is no Stream\(", "another thread's stream: mlx/backend/*/device.cpp"),
            (r".*(U|u)nsupported dtype", "mlx/backend/cuda"),
        )
    ),
)
_PATTERNS: Final = [(re.compile(text.pattern, re.DOTALL), text.fault) for text in FAULT_TEXTS]


def classify(error: BaseException) -> Fault:
    """Return what an error says of the device.

    Only a RuntimeError itself can be the device's: MLX raises ValueError for shapes and types, and
    Python whatever else, such as NotImplementedError, which is a RuntimeError too.
    """
    if isinstance(error, MemoryError):
        return Fault.PRESSURE
    if type(error) is not RuntimeError:
        return Fault.ROW
    message = str(error)
    matches = (fault for pattern, fault in _PATTERNS if pattern.match(message))
    return next(matches, Fault.UNKNOWN)
