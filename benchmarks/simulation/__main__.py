"""python -m benchmarks.simulation: predict from a device's file, or check on this machine."""

import argparse
import asyncio
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.simulation.checking import check
from benchmarks.simulation.device import read_device, write_device
from benchmarks.simulation.measuring import measure_machine, served_models
from benchmarks.simulation.tables import checked, predicted_tables

BASE_M = Path(__file__).parent / "devices" / "base-m.json"


def main() -> None:
    """Print markdown tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.add_argument(
        "device", nargs="?", type=Path, default=BASE_M, help="JSON of stage costs (base-m.json)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="measure this machine, then run the gateway beside its prediction (two minutes)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write what --check measured")
    options = parser.parse_args()
    if options.check:
        asyncio.run(_check(options.out))
    else:
        print(predicted_tables(read_device(options.device)))


async def _check(out: Path | None) -> None:
    async with served_models() as peer:
        measured = await measure_machine(peer)
        if out is not None:
            write_device(measured.device, out, client=asdict(measured.client))
        print(checked(await check(measured, peer)))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
