"""The findings on a machine and its models, as a table and as JSON.

A report contains no paths of this machine, and no host name.
"""

import json
import math
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal

from gateway import __version__
from gateway.logs import human_bytes
from gateway.registry import ModelSpec, packaged

State = Literal["ok", "warn", "fail", "skip"]

COLUMNS: Final = ("Of", "Check", "State", "Found")
MACHINE: Final = "machine"
PACKAGES: Final = (
    *("mlx", "mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm", "outlines"),
    *("outlines-core", "llguidance", "tokenizers", "transformers", "numpy", "scipy-openblas32"),
)
# An absolute path, up to its end or the next word. URLs and "tokens/s" do not match.
_REST: Final = r"""[^\s'"`,;:()<>\[\]]*"""
_ABSOLUTE: Final = rf"(?<![\w.~/…])~?/(?!/){_REST}"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check, in words and in numbers."""

    check: str
    # "fail" is wrong, "warn" could be better, and "skip" was not run.
    state: State
    message: str
    measured: Mapping[str, Any] = field(default_factory=dict)


def versions() -> dict[str, str]:
    versions = {"mlx-gateway": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def system() -> dict[str, str | int]:
    is_linux = sys.platform == "linux"
    cores = len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1
    return {"os": platform.platform(), "machine": platform.machine(), "cores": cores}


def describe_system() -> str:
    """Return the system and the processor, without the name of a custom kernel build."""
    macos = platform.mac_ver()[0]
    if macos:
        return f"macOS {macos} {platform.machine()}"
    libc = " ".join(platform.libc_ver())
    release = platform.release().partition("-")[0]
    return f"{platform.system()} {release} {platform.machine()} {libc}".strip()


def private_folders() -> list[str]:
    """Return folders that errors may name but reports must not, the longest first."""
    # One folder may be inside another.
    folders = {Path.home(), Path.cwd(), Path(tempfile.gettempdir()), Path(sys.prefix)}
    named = {str(path) for folder in folders for path in (folder, folder.resolve())}
    return sorted(named - {"/"}, key=len, reverse=True)


def redact_paths(value: Any, folders: Sequence[str]) -> Any:
    """Return a value for JSON, with the absolute paths in its texts replaced."""
    match value:
        case str():
            # Names of `folders` may contain spaces, which would end a match of _ABSOLUTE.
            known = [f"{re.escape(folder)}{_REST}" for folder in folders]
            return re.sub("|".join([*known, _ABSOLUTE]), "/…", value)
        case float() if not math.isfinite(value):  # JSON has neither NaN nor infinities
            return str(value)
        case Mapping():
            return {key: redact_paths(item, folders) for key, item in value.items()}
        case list() | tuple():
            return [redact_paths(item, folders) for item in value]
        case _:
            return value


@dataclass(frozen=True, slots=True)
class Checked:
    """A model and its findings."""

    spec: ModelSpec
    findings: Sequence[Finding]


@dataclass(frozen=True, slots=True)
class Report:
    """All findings on a machine and its models."""

    device: Mapping[str, Any]
    findings: Sequence[Finding]
    models: Sequence[Checked]

    @property
    def has_passed(self) -> bool:
        findings = chain(self.findings, *(model.findings for model in self.models))
        return all(finding.state != "fail" for finding in findings)

    def rows(self) -> list[tuple[str, str, str, str]]:
        installed = ", ".join(f"{name} {number}" for name, number in versions().items())
        rows = [
            (MACHINE, "versions", "ok", f"{installed}."),
            (MACHINE, "device", "ok", f"{', '.join(self._describe())}."),
        ]
        rows += [_row(MACHINE, finding) for finding in self.findings]
        return rows + [
            _row(model.spec.id, finding) for model in self.models for finding in model.findings
        ]

    def _describe(self) -> Iterator[str]:
        about = system()
        device = self.device.get("device")
        if device is not None:
            yield f"{device} ({self.device.get('device_name', 'unnamed')})"
            yield f"models may hold {human_bytes(self.device['models_may_hold_bytes'])}"
        if "blas_described" in self.device:
            yield f"{self.device['blas_described']} ({self.device['gflops']} GFLOP/s)"
        yield f"{about['cores']} cores"
        yield str(about["os"])

    def as_json(self) -> dict[str, Any]:
        report = {
            "passed": self.has_passed,
            "versions": versions(),
            "system": system(),
            "device": self.device,
            "findings": [asdict(finding) for finding in self.findings],
            "models": [
                {
                    "model": model.spec.id,
                    "kind": model.spec.kind,
                    "source": str(model.spec.source),
                    "findings": [asdict(finding) for finding in model.findings],
                }
                for model in self.models
            ],
        }
        redacted: dict[str, Any] = redact_paths(report, private_folders())
        return redacted

    def as_block(self, day: str) -> str:
        """Return the report as JSON, as at the end of the pages in docs/devices."""
        rows = [(MACHINE, finding) for finding in self.findings]
        rows += [(model.spec.kind, finding) for model in self.models for finding in model.findings]
        judged = [(of, finding) for of, finding in rows if finding.state in ("ok", "fail")]
        failures = [
            f"{kind}: {finding.check}" for kind, finding in judged if finding.state == "fail"
        ]
        installed, about = versions(), system()
        block = {
            "device": self.device.get("device_name", "unknown"),
            "kind": self.device.get("device", "unknown"),
            "memory_gib": round(self.device.get("memory_bytes", 0) / (1 << 30), 1),
            "cores": about["cores"],
            "system": describe_system(),
            "python": installed["python"],
            "mlx": installed.get("mlx"),
            "mlx_lm": installed.get("mlx-lm"),
            "commit": installed["mlx-gateway"],
            "date": day,
            "small": True,
            "verdicts": len(judged),
            "failed": len(failures),
            "failures": failures,
            "figures": dict(self._figures()),
        }
        return json.dumps(redact_paths(block, private_folders()), ensure_ascii=False)

    def _figures(self) -> Iterator[tuple[str, float]]:
        for model in self.models:
            measured = {finding.check: finding.measured for finding in model.findings}
            dtype = measured.get("load", {}).get("dtype", "unknown")
            # A model's id may be private, but a package's name is not.
            package, name = packaged(model.spec.source), "own model"
            if package is not None:
                name = package.module
            for unit, rates in measured.get("speed", {}).items():
                for rows, rate in rates.items():
                    streams = "1 stream" if rows == "1" else f"{rows} streams"
                    label = (unit.removesuffix("_per_s"), name, dtype, streams, "gateway's engine")
                    yield ", ".join(label), round(rate, 2)


def _row(name: str, found: Finding) -> tuple[str, str, str, str]:
    # An error's text may have several lines.
    return name, found.check, found.state, " ".join(found.message.split())
