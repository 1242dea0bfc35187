"""The time that a gateway takes to start, and its memory then: of several checkouts, by turns.

    python -m benchmarks.startup ../before .

Each serves the demo's models, not loaded. Prints medians of five, beside the first checkout's:
seconds to the first answer of /health; seconds to /ready; MB resident once ready; and seconds of
`import gateway.cli`.
"""

import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Final

RUNS: Final = 5
WAIT_S: Final = 60.0
_UNLOADED: Final = {
    f"GATEWAY_{each}_PRELOAD": "false" for each in ("DEMO_CHAT", "ALL_MINILM_L6_V2")
}
NAMES: Final = ("to /health, s", "to /ready, s", "resident, MB", "import, s")


def measure(checkout: Path) -> list[float]:
    """Start a checkout's gateway once; return its figures, in the order of NAMES."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(checkout), "GATEWAY_PORT": "0"}
    environment["GATEWAY_LOG_FORMAT"] = "json"
    began = time.perf_counter()
    importing = [sys.executable, "-c", "import gateway.cli"]
    subprocess.run(importing, cwd=checkout, env=environment, check=True)
    imported_s = time.perf_counter() - began
    with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryDirectory() as home:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "serve", "--models", "demo/models.yaml"],
            cwd=checkout,
            env=environment | {"HOME": home} | _UNLOADED,
            stderr=log,
        )
        try:
            healthy_s = _until(f"{_url(log, began)}/health", began)
            ready_s = _until(f"{_url(log, began)}/ready", began)
            asked = ["ps", "-o", "rss=", "-p", str(process.pid)]
            resident = int(subprocess.run(asked, capture_output=True, check=True).stdout) / 1000
        finally:
            process.kill()
            process.wait(10)
    return [healthy_s, ready_s, resident, imported_s]


def _url(log: IO[str], began: float) -> str:
    while time.perf_counter() - began < WAIT_S:
        log.seek(0)
        if found := re.search(r'"url":"([^"]+)"', log.read()):
            return found[1]
        time.sleep(0.005)
    raise TimeoutError("it does not listen")


def _until(url: str, began: float) -> float:
    """Return the seconds after which a URL answers 200."""
    while (seconds := time.perf_counter() - began) < WAIT_S:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return seconds
        except (urllib.error.HTTPError, ConnectionError):
            time.sleep(0.01)
    raise TimeoutError(f"{url} does not answer 200")


def main() -> None:
    checkouts = [Path(each).resolve() for each in sys.argv[1:]] or [Path.cwd()]
    runs: list[list[list[float]]] = [[] for _ in checkouts]
    for each in checkouts:
        measure(each)  # compiles what is new
    for _ in range(RUNS):
        for own, each in zip(runs, checkouts, strict=True):
            own.append(measure(each))
    medians = [[statistics.median(each) for each in zip(*own, strict=True)] for own in runs]
    for name, *values in zip(NAMES, *medians, strict=True):
        shown = ", ".join(f"{value:.3g} ({value / values[0]:.2f})" for value in values)
        print(f"{name}: {shown}")


if __name__ == "__main__":
    main()
