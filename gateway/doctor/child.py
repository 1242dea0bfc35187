"""The process that loads one model and tries it: one of its own, since a fault of mlx ends it.

    python -m gateway.doctor.child models.yaml [ID]

Writes a line of JSON for the machine's facts, for each stage as it begins, and for each finding.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from gateway.doctor.examination import examine
from gateway.doctor.findings import Finding
from gateway.registry import load_catalog
from gateway.settings import load_settings, variables


def main() -> None:
    """Try a model, or only look at the machine."""
    models, *ids = sys.argv[1:]
    settings = load_settings({"models": Path(models)})
    tell = _apart_from_stdout()
    from gateway.app.engines import mlx_engines
    from gateway.doctor import loading

    engines = mlx_engines(settings)
    engines.begin()
    tell(facts=loading.facts(engines, settings))
    for name in ids:
        resolved = load_catalog(settings.models, variables()).resolve(name)
        opened = partial(loading.load, resolved, engines, settings)
        for event in examine(opened, partial(loading.held_bytes, engines)):
            if isinstance(event, Finding):
                tell(finding=asdict(event))
            else:
                tell(stage=event)
    tell(stage="exit")
    engines.end()


def _apart_from_stdout() -> Callable[..., None]:
    """Keep stdout for our lines: what libraries print there goes to stderr."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(**said: Any) -> None:
        print(json.dumps(said), file=lines, flush=True)

    return tell


if __name__ == "__main__":
    main()
