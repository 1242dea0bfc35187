"""python -m benchmarks.device: compare this device's answers, then measure it; 1 if one is wrong,
or if there is no verdict.

Each part runs in a process of its own, for a fault of a device ends the process.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from benchmarks.device.machine import CHECKOUT, Machine
from benchmarks.device.page import failures, has_verdict, write_page
from benchmarks.device.parts import Bench, Part, parts, pick
from benchmarks.device.results import Result, State
from benchmarks.device.table import DOCS, update
from gateway.engine.device import leave

WORK: Final = CHECKOUT / ".device"
PATIENCE: Final = 10  # times a part's guess is its time limit, and
LEAST_LIMIT_S: Final = 600
ERROR_CHARS: Final = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that are asked for, or that the state lacks; write the page."""
    options = _options(arguments)
    machine = Machine.read()
    is_small = options.small or (machine.is_cpu and not options.whole)
    listed = parts(is_small=is_small)
    if options.inside is not None:
        bench = Bench(options.models, is_small)
        part = next(part for part in listed if part.name == options.inside)
        return _run_inside(part, bench, options.out)
    if options.parts:
        for number, part in enumerate(listed, 1):
            print(f"{number:3}  {part.name} (about {part.seconds} s)")
        return 0
    if not all(1 <= number <= len(listed) for number in options.part):
        print(f"parts are 1 to {len(listed)}: --parts lists them", file=sys.stderr)
        return 2
    state = State.load(options.state, {**asdict(machine), "small": is_small})
    if state.dropped:
        print(f"{state.dropped} parts of another device or version are dropped", file=sys.stderr)

    def run(part: Part) -> Result:
        return _run(part, machine, options, is_small=is_small)

    run_parts(pick(listed, options.part), state, run, is_again=bool(options.part))
    results = {part.name: state.results[part.name] for part in listed if part.name in state.results}
    return _write(machine, results, options, is_small=is_small)


def run_parts(
    chosen: Sequence[Part], state: State, run: Callable[[Part], Result], *, is_again: bool
) -> None:
    """Run parts, each once, and add each result to the state.

    Those that it has already run only if they were not done, or if `is_again`.
    """
    for part in chosen:
        known = state.results.get(part.name)
        if known is not None and known.status == "done" and not is_again:
            continue
        print(f"{part.name} …", end="", file=sys.stderr, flush=True)
        result = run(part)
        state.add(part.name, result)
        print(f" {result.status}, {result.seconds:.0f} s", file=sys.stderr)


def _run(part: Part, machine: Machine, options: argparse.Namespace, *, is_small: bool) -> Result:
    """Run a part in a process of its own, unless something is missing here."""
    if obstacle := part.obstacle(machine.memory_bytes):
        return Result("skipped", error=obstacle)
    size = "--small" if is_small else "--whole"
    command = ("-m", "benchmarks.device", "--inside", part.name, size)
    return run_process(
        [*command, "--models", str(options.models)], max(LEAST_LIMIT_S, PATIENCE * part.seconds)
    )


def run_process(command: Sequence[str], limit_s: float) -> Result:
    """Run Python with a command that writes a result to the file `--out`; of a process that dies or
    takes too long, the result is how it ended. Its own processes end with it.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "result.json", Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *command, "--out", str(file)],
                cwd=CHECKOUT,
                env={**os.environ, "PYTHONPATH": str(CHECKOUT)},  # its servers run elsewhere
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                end = f"it ended with status {process.wait(limit_s)}"
            except subprocess.TimeoutExpired:
                end = f"it took longer than {limit_s:.0f} s"
            finally:
                _end_group(process)
        seconds = time.monotonic() - started
        if file.exists():
            result = Result.from_json(json.loads(file.read_text(encoding="utf-8")))
            return replace(result, seconds=seconds)
        last = log.read_text(encoding="utf-8", errors="replace")[-ERROR_CHARS:]
    return Result("failed", seconds, f"{last}\n{end}")


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a process and the servers that it may have left."""
    # macOS raises the latter for a group that is over
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _run_inside(part: Part, bench: Bench, file: Path) -> int:
    """Run a part in this process; write its result, or its error."""
    try:
        result = part.run(bench)
    except Exception as error:
        traceback.print_exc()
        result = Result("failed", error=f"{type(error).__name__}: {error}"[:ERROR_CHARS])
    file.write_text(json.dumps(result.to_json()), encoding="utf-8")
    leave()
    return 0


def _write(
    machine: Machine, results: dict[str, Result], options: argparse.Namespace, *, is_small: bool
) -> int:
    """Write the page, the JSON and the table of all pages; return the exit status."""
    day = datetime.now(UTC).date().isoformat()
    name = "".join(c if c.isalnum() else "-" for c in machine.device.lower()).strip("-")
    for folder in (options.out, options.pages):
        folder.mkdir(parents=True, exist_ok=True)
    page = options.pages / f"{name}-{day}.md"
    page.write_text(write_page(machine, results, day, is_small=is_small), encoding="utf-8")
    measured_on = {**asdict(machine), "small": is_small}
    saved = {part: result.to_json() for part, result in results.items()}
    text = json.dumps({"measured_on": measured_on, "parts": saved}, indent=1)
    (options.out / f"{page.stem}.json").write_text(text, encoding="utf-8")
    if (options.pages / "README.md").exists():
        update(options.pages)
    wrong = failures(results)
    print(page)
    for verdict in wrong:
        print(f"parity failed: {verdict}")
    has_parity = any(part.startswith("parity") for part in results)
    is_unproved = has_parity and not has_verdict(results)
    if is_unproved:
        print("no parity verdict")
    return int(bool(wrong) or is_unproved)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--small", action="store_true", help="small shapes: the default on a CPU")
    sizes.add_argument("--whole", action="store_true", help="whole shapes on a CPU too")
    parser.add_argument("--parts", action="store_true", help="list the parts")
    parser.add_argument(
        "--part", type=int, action="append", default=[], metavar="N", help="run this, again or not"
    )
    parser.add_argument("--state", type=Path, default=WORK / "state.json", metavar="FILE")
    parser.add_argument("--models", type=Path, default=WORK / "models", metavar="DIR")
    parser.add_argument("--out", type=Path, default=WORK, metavar="DIR", help="where the JSON goes")
    parser.add_argument("--pages", type=Path, default=DOCS, metavar="DIR", help="and the page")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
