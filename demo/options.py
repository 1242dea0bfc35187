"""The command line that the programs which train models share."""

import argparse
from pathlib import Path
from typing import Any


def read_options(about: str | None, *, minutes: float) -> dict[str, Any]:
    """Return `out`, `minutes`, `seed` and `start` from the command line."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument(
        "--minutes", type=float, default=minutes, help="wall-clock time to train for"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="folder written earlier to go on from")
    return vars(parser.parse_args())
