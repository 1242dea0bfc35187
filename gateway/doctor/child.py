"""The process that loads one model and tries it; a fault of mlx ends only this process.

    python -m gateway.doctor.child models.yaml [ID]

It writes one line of JSON for the device's facts, for each stage that begins, and each finding.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from gateway.doctor.findings import Finding
from gateway.doctor.trials import run_trial
from gateway.registry import load_catalog
from gateway.settings import load_settings, variables


def main() -> None:
    """Try a model, or only report the device."""
    models, *ids = sys.argv[1:]
    settings = load_settings({"models": Path(models)})
    write = _take_stdout()
    from gateway.app.engines import mlx_engines
    from gateway.doctor import loading

    engines = mlx_engines(settings)
    engines.begin()
    write(facts=loading.facts(engines, settings))
    for name in ids:
        resolved = load_catalog(settings.models, variables()).resolve(name)
        open_trial = partial(loading.load, resolved, engines, settings)
        for event in run_trial(open_trial, partial(loading.held_bytes, engines)):
            if isinstance(event, Finding):
                write(finding=asdict(event))
            else:
                write(stage=event)
    write(stage="exit")
    engines.end()


def _take_stdout() -> Callable[..., None]:
    """Return what writes our lines to stdout; what libraries print there goes to stderr."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def write(**line: Any) -> None:
        print(json.dumps(line), file=lines, flush=True)

    return write


if __name__ == "__main__":
    main()
