"""Which pins have no wheel for a platform that README names: a table, and status 1 if there is one.

    python -m deploy.release.wheels

uv resolves the pins of requirements/ as each platform's pip would, from wheels alone. It asks an
index, and installs nothing.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
# dev.txt has what serving, `bench`, traces and the tests need: CI installs it on each platform.
PINS: Final = ("requirements/dev.txt", "requirements/models.txt")
CUDA: Final = ("requirements/cuda.txt", "requirements/cuda13.txt")
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
# macOS 14 is the oldest that mlx has wheels for; glibc 2.35 is Ubuntu 22.04's and mlx's.
LINUX: Final = {"Linux x86-64": "x86_64-manylinux_2_35", "Linux aarch64": "aarch64-manylinux_2_35"}
PLATFORMS: Final = {"macOS 14 arm64": "aarch64-apple-darwin", **LINUX}
OLDEST_MACOS: Final = {"MACOSX_DEPLOYMENT_TARGET": "14.0"}


def main() -> int:
    """Print the table; return the exit status."""
    print(f"| | {' | '.join(PYTHONS)} |\n| --- |{' --- |' * len(PYTHONS)}")
    wholes = [row(name, platform, PINS) for name, platform in PLATFORMS.items()]
    for file in CUDA:
        wholes += [row(f"{name}, {Path(file).stem}", LINUX[name], (file,)) for name in LINUX]
    return 0 if all(wholes) else 1


def row(name: str, platform: str, files: tuple[str, ...]) -> bool:
    """Print a row of the table; return whether each pin of the files has its wheels."""
    pins = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    cells, is_whole = [], True
    for python in PYTHONS:
        count, missing = resolve(pins, platform, python)
        is_whole = is_whole and not missing
        cells.append(", ".join(missing) or f"{count} wheels")
    print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return is_whole


def resolve(pins: str, platform: str, python: str) -> tuple[int, list[str]]:
    """Return how many wheels there are for the pins, and which pins have none.

    uv names one that has none at a time: it is left out, and the others are tried.
    """
    missing: list[str] = []
    while True:
        kept = without(pins, missing)
        done = _ask(kept, platform, python)
        if done.returncode == 0:
            return len(re.findall(r"^[\w.-]+==", done.stdout, flags=re.MULTILINE)), missing
        missing.append(blamed(names(kept), done.stderr))


def blamed(pins: list[str], error: str) -> str:
    """Return which pin uv's error says has no wheel; exit with any other error."""
    # "Because mlx{sys_platform == 'darwin'}==0.32.4 has no wheels with a matching platform tag"
    found = re.search(r"\b([\w.-]+)(?:\{[^}]*\})?==\S+ has no (?:usable )?wheels", error)
    if not found or found[1] not in pins:
        sys.exit(error)
    return found[1]


def names(pins: str) -> list[str]:
    """List the packages that a file of pins names."""
    return re.findall(r"^([\w.-]+)==", pins, flags=re.MULTILINE)


def without(pins: str, missing: list[str]) -> str:
    """Return the pins, each with its hashes, but those of some packages."""
    entries = re.split(r"^(?=[\w.-]+==)", pins, flags=re.MULTILINE)
    return "".join(entry for entry in entries if entry.partition("==")[0] not in missing)


def _ask(pins: str, platform: str, python: str) -> "subprocess.CompletedProcess[str]":
    command = (
        *(str(Path(sys.executable).with_name("uv")), "pip", "compile", "-", "--no-deps", "--quiet"),
        *("--only-binary", ":all:", "--no-header", "--no-annotate"),
        *("--python-platform", platform, "--python-version", python),
    )
    environment = os.environ | OLDEST_MACOS
    return subprocess.run(
        command, input=pins, env=environment, capture_output=True, text=True, check=False
    )


if __name__ == "__main__":
    sys.exit(main())
