"""What was found of a machine and its models: a table's rows, and JSON for a bug report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from gateway.doctor import machine
from gateway.doctor.findings import Finding, megabytes
from gateway.registry import ModelSpec

COLUMNS: Final = ("Of", "Check", "State", "Found")
MACHINE: Final = "machine"


@dataclass(frozen=True, slots=True)
class Checked:
    """A model, and what was found of it."""

    spec: ModelSpec
    findings: Sequence[Finding]


@dataclass(frozen=True, slots=True)
class Report:
    """The device's facts, what was found without a model, and each model."""

    device: Mapping[str, Any]
    findings: Sequence[Finding]
    models: Sequence[Checked]

    @property
    def has_passed(self) -> bool:
        """Return True if nothing has failed; what was skipped may not have been tried at all."""
        every = [*self.findings, *(each for model in self.models for each in model.findings)]
        return all(each.state != "fail" for each in every)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Give the table's rows."""
        versions = ", ".join(f"{name} {number}" for name, number in machine.versions().items())
        rows = [
            (MACHINE, "versions", "ok", f"{versions}."),
            (MACHINE, "device", "ok", f"{', '.join(self._described())}."),
        ]
        rows += [_row(MACHINE, each) for each in self.findings]
        return rows + [
            _row(model.spec.id, each) for model in self.models for each in model.findings
        ]

    def _described(self) -> Iterator[str]:
        system = machine.system()
        if (device := self.device.get("device")) is not None:
            yield f"{device} ({self.device.get('device_name', 'of no name')})"
            yield f"models may hold {megabytes(self.device['models_may_hold_bytes'])}"
        if "blas_described" in self.device:
            yield f"{self.device['blas_described']} ({self.device['gflops']} GFLOP/s)"
        yield f"{system['cores']} cores"
        yield str(system["os"])

    def as_json(self) -> dict[str, Any]:
        """Give everything that was found, without paths of this machine."""
        told = {
            "passed": self.has_passed,
            "versions": machine.versions(),
            "system": machine.system(),
            "device": self.device,
            "findings": [asdict(each) for each in self.findings],
            "models": [
                {
                    "model": model.spec.id,
                    "kind": model.spec.kind,
                    "source": str(model.spec.source),
                    "findings": [asdict(each) for each in model.findings],
                }
                for model in self.models
            ],
        }
        without: dict[str, Any] = machine.without_paths(told, machine.private_folders())
        return without


def _row(name: str, found: Finding) -> tuple[str, str, str, str]:
    """Return a row in one line: an answer may have several."""
    return name, found.check, found.state, " ".join(found.said.split())
