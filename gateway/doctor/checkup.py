"""Which models are checked, and the check of each in a process of its own."""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from gateway.app.hub import hub_of
from gateway.doctor import embedding, generation
from gateway.doctor.findings import Finding
from gateway.doctor.process import Ending, Heard, listen
from gateway.doctor.report import Checked, Report
from gateway.engine import hub as sources
from gateway.errors import GatewayError, ModelUnavailable
from gateway.registry import ModelSpec, PackageSource
from gateway.settings import Settings

Told: TypeAlias = Callable[[str, str], None]
STAGES: Final = {"embedding": embedding.STAGES, "chat": generation.STAGES}


def _nobody(model: str, stage: str) -> None:
    """Hear of no stage."""


def choose(specs: Iterable[ModelSpec], is_here: Callable[[ModelSpec], bool]) -> list[ModelSpec]:
    """Choose a model of each kind: one on board, else one whose files are here, else the first."""
    first: dict[str, ModelSpec] = {}
    for spec in sorted(specs, key=lambda spec: (not _is_on_board(spec), not is_here(spec))):
        first.setdefault(spec.kind, spec)
    return [first[kind] for kind in sorted(first, reverse=True)]


def _is_on_board(spec: ModelSpec) -> bool:
    return isinstance(spec.source, PackageSource)


def absent(spec: ModelSpec, settings: Settings) -> Finding | None:
    """Return why a model cannot be checked, with the command that adds it; None if it can be."""
    try:
        if sources.on_disk(spec, hub_of(settings, may_download=False)) is not None:
            return None
    except ModelUnavailable as error:
        return Finding("files", "skip", str(error))
    except GatewayError as error:
        return Finding("files", "fail", str(error))
    return Finding("files", "skip", f"not on disk. Run: mlx-gateway pull {spec.id}")


def check(specs: Sequence[ModelSpec], settings: Settings, told: Told = _nobody) -> Report:
    """Check models one after another; `told` hears of each stage as it begins: model, stage."""
    checked: list[Checked] = []
    device: dict[str, Any] = {}
    for spec in specs:
        if (missing := absent(spec, settings)) is not None:
            checked.append(Checked(spec, [missing]))
            continue
        heard = Heard(STAGES[spec.kind], partial(told, spec.id))
        checked.append(Checked(spec, heard.end(_run(settings, heard, spec.id))))
        device |= heard.facts
    if device:
        return Report(device, [], checked)
    heard = Heard()
    found = heard.end(_run(settings, heard))
    return Report(heard.facts, found, checked)


def _run(settings: Settings, heard: Heard, *ids: str) -> Ending:
    command = [sys.executable, "-m", "gateway.doctor.child", str(settings.models), *ids]
    return listen(command, heard.add)
