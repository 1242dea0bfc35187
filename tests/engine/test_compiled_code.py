"""Code that mlx compiles for a CPU: its folder, its room on disk, and failures without either."""

import os
import shutil
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from gateway.app.loading import warm_encoder
from gateway.engine import compiled_code
from gateway.engine.compiled_code import LEAST_BYTES, choose_folder, fuse, name_failure, unfused
from gateway.engine.device_faults import classify
from gateway.engine.embedding.cross_encoder import CrossEncoderEngine
from gateway.engine.embedding.engine import EmbeddingEngine
from gateway.engine.embedding.label_scorer import LabelScorer
from gateway.engine.generation import engine as generation
from gateway.engine.generation.engine import GenerationEngine
from gateway.errors import Fault
from tests.compilers import (
    NO_ROOM,
    Compiler,
    compiling_in,
    in_c,
    is_fused,
    needs_compiler,
    new_function,
    write_compiler,
)

Usage = namedtuple("Usage", "total used free")
linux = pytest.mark.skipif(sys.platform != "linux", reason="macOS gives a user a temporary folder")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with compiling_in(tmp_path / "compiled") as folder:
        mx.set_default_device(mx.Device(mx.cpu, 0))
        yield folder


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = write_compiler(tmp_path / "bin")
    monkeypatch.setenv("PATH", compiler.path)
    return compiler


def leave(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Let every disk have this number of bytes left."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, free))


@linux
@pytest.mark.usefixtures("folder")
def test_mlx_compiles_in_the_users_cache_and_nothing_else_moves_there(tmp_path: Path) -> None:
    python = os.environ.get("TMPDIR")
    folder = choose_folder({"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": "/elsewhere"})
    assert folder.parent == tmp_path / "mlx-gateway"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert in_c("TMPDIR") == str(folder)
    assert os.environ.get("TMPDIR") == python


@linux
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("matter", ["no cache", "open to others", "read-only", "nothing may run"])
def test_a_cache_that_will_not_do_leaves_mlx_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, matter: str
) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path), "TMP": "/second", "TMPDIR": "/first"}
    match matter:
        case "no cache":
            del environment["XDG_CACHE_HOME"]
        case "open to others":
            choose_folder(environment).chmod(0o750)
        case "read-only":
            monkeypatch.setattr(os, "access", lambda *_: False)
        case "nothing may run":
            found = SimpleNamespace(f_flag=os.ST_NOEXEC)
            monkeypatch.setattr(os, "fstatvfs", lambda _: found)
    before = in_c("TMPDIR")
    assert choose_folder(environment) == Path("/first")
    assert in_c("TMPDIR") == before


def test_without_room_passes_run_unfused_until_there_is_some(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fuse()
    assert is_fused()
    leave(monkeypatch, LEAST_BYTES - 1)
    assert not fuse()
    assert not is_fused()
    leave(monkeypatch, LEAST_BYTES)
    assert fuse()
    assert is_fused()
    folder.rmdir()
    assert not fuse()
    assert compiled_code.room() == 0


@pytest.mark.usefixtures("folder")
def test_who_wants_nothing_compiled_gets_nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    assert fuse()
    assert not is_fused()


@pytest.mark.usefixtures("folder")
def test_passes_are_unfused_for_a_while_and_then_as_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for room in (LEAST_BYTES, 0):
        with unfused():
            assert not is_fused()
            leave(monkeypatch, room)
        assert is_fused() is (room > 0)


@needs_compiler
def test_a_compilation_that_fails_names_the_folder_and_its_bytes_and_is_no_fault_of_the_device(
    folder: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(monkeypatch, 4096)
    compiler.is_now("full")
    function = new_function()
    with pytest.raises(RuntimeError) as raised:
        mx.eval(function(mx.ones(4)))
    assert classify(raised.value) is Fault.COMPILER
    named = name_failure(raised.value)
    assert f"could not compile in {folder}, where 4,096 bytes are free: " in str(named)
    assert NO_ROOM in str(named)
    assert classify(named) is Fault.COMPILER
    assert function(mx.ones(4)).tolist() == [1.0] * 4  # unfused, from then on


@needs_compiler
def test_code_that_is_broken_is_not_loaded_for_ever(folder: Path, compiler: Compiler) -> None:
    """Code may be broken by a full disk, or by a loss of power before it was on the disk."""
    compiler.is_now("broken")
    function = new_function()
    with pytest.raises(RuntimeError, match="shared library") as raised:
        mx.eval(function(mx.ones(4)))
    assert list(folder.rglob("lib*.so"))
    assert classify(raised.value) is Fault.COMPILER
    somebodys = folder / "mlx" / "a checkout of it" / "notes.txt"
    somebodys.parent.mkdir()
    somebodys.write_text("kept")
    assert str(folder) in str(name_failure(raised.value))
    assert not list(folder.rglob("lib*.so"))
    assert somebodys.read_text() == "kept"
    compiler.is_now("full")
    fuse()
    with pytest.raises(RuntimeError, match="No space left"):
        mx.eval(function(mx.ones(4)))


def test_a_folder_that_is_gone_is_no_fault_of_the_device(folder: Path) -> None:
    folder.rmdir()
    if shutil.which("g++"):
        with pytest.raises(RuntimeError, match="filesystem error") as raised:
            mx.eval(new_function()(mx.ones(4)))
        assert classify(raised.value) is Fault.COMPILER


@pytest.mark.parametrize(
    "error", [RuntimeError("[malloc] Unable"), ValueError("[Compile::eval_cpu] no"), KeyError("x")]
)
def test_any_other_error_stays_as_it_is(folder: Path, error: Exception) -> None:
    (folder / "mlx").mkdir()
    assert name_failure(error) is error
    assert (folder / "mlx").is_dir()
    assert is_fused()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "engine", [EmbeddingEngine, CrossEncoderEngine, LabelScorer, GenerationEngine]
)
def test_the_probe_of_a_device_compiles_nothing(
    engine: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a full disk would look like a lost device. A model is warmed up as it will run."""
    seen: list[bool] = []

    def note(*_: object) -> None:
        seen.append(is_fused())

    monkeypatch.setattr(generation, "read_probe", note)
    encoder = {"outputs": (), "encode": list, "encode_pairs": lambda *_: []}
    decoder = {"synchronize": list, "_model": None, "_setup": SimpleNamespace(vocab_size=1)}
    operation = "embed_outputs" if engine is EmbeddingEngine else "score"
    some: Any = SimpleNamespace(**encoder, **decoder, **{operation: note})
    probe: Any = engine
    probe.probe(some)
    assert seen == [False]
    assert is_fused()
    if engine is not GenerationEngine:
        warm_encoder("m", some)
        assert seen == [False, True]
