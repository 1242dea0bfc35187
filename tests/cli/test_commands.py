"""check, config, models and schema: their output and their ends."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from gateway.cli import main
from gateway.settings import shipped_models_file
from tests.processes import environment, ran

GOOD = "version: 1\nmodels:\n  m: {kind: chat, source: 'hub:org/name', aliases: [n]}\n"
NOWHERE = {"GATEWAY_PORT": "0", "GATEWAY_HUB_ENDPOINT": "http://127.0.0.1:9"}
HEAVY = ("mlx", "mlx_lm", "outlines", "transformers", "torch")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder with no GATEWAY_ variable set."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.upper().startswith("GATEWAY_"):
            monkeypatch.delenv(name)
    return tmp_path


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def test_check_says_that_nothing_is_wrong(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "models.yaml").write_text(GOOD)
    assert run("check") == 0
    assert capsys.readouterr().out == "models.yaml: 1 models by 2 names, no problems\n"


def test_init_writes_a_file_to_edit_and_never_over_one(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("init") == 0
    assert (here / "models.yaml").read_text() == shipped_models_file().read_text()
    assert run("check") == 0
    (here / "models.yaml").write_text(GOOD)
    capsys.readouterr()
    assert run("init") == 1
    assert capsys.readouterr().err == "models.yaml is here already, and stays as it is.\n"
    assert (here / "models.yaml").read_text() == GOOD


def test_init_leaves_no_half_file_on_a_full_disk(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "read_text", fail)
    assert run("init") == 1
    assert capsys.readouterr().err == "models.yaml could not be written: No space left on device\n"
    assert not list(here.iterdir())


def test_check_prints_each_problem_and_ends_with_1(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "my.yaml").write_text("version: 1\nmodels:\n  m: {kind: chta, sorce: x}\n  n: 3\n")
    assert run("check", "--models", "my.yaml") == 1
    assert capsys.readouterr().err.splitlines() == [
        "my.yaml:3: m: `kind` should be 'embedding', 'rerank' or 'chat', not 'chta'; "
        "did you mean 'chat'?",
        "my.yaml:4: n: should be a mapping, not 3",
    ]


@pytest.mark.parametrize("text", ["", "# nothing yet\n"])
def test_check_of_an_empty_file_names_the_next_step(
    here: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (here / "models.yaml").write_text(text)
    assert run("check") == 1
    assert capsys.readouterr().err == (
        "models.yaml:1: the file is empty: remove it, and `mlx-gateway init` writes one\n"
    )


def test_check_notes_that_no_model_is_served(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "models.yaml").write_text("version: 1\nmodels: {}\n")
    assert run("check") == 0
    assert capsys.readouterr().out.splitlines() == [
        "note: models.yaml lists no models, so none is served: see `mlx-gateway models recommend`",
        "models.yaml: 0 models by 0 names, no problems",
    ]


def test_check_notes_what_can_be_served_all_the_same(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package that is not installed and a misspelt variable leave the status at 0."""
    (here / "models.yaml").write_text(GOOD.replace("hub:org/name", "package:not_here_weights"))
    monkeypatch.setenv("GATEWAY_PROT", "1")
    assert run("check") == 0
    out = capsys.readouterr().out
    assert "note: models.yaml:3: m: the package not_here_weights is not installed" in out
    assert "note: GATEWAY_PROT is set, and nothing reads it; did you mean GATEWAY_PORT?" in out


def test_check_notes_more_preloaded_models_than_places(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "{kind: chat, source: hub:org/name, preload: true}"
    adapter = "{kind: chat, base: a, adapter: hub:org/lora, preload: true}"
    (here / "models.yaml").write_text(
        f"version: 1\nmodels:\n  a: {model}\n  b: {model}\n  c: {adapter}\n"
    )
    monkeypatch.setenv("GATEWAY_CACHE_MAX_MODELS", "1")
    assert run("check") == 0
    assert "note: models.yaml: 2 models are loaded at start, and GATEWAY_CACHE_MAX_MODELS is 1" in (
        capsys.readouterr().out
    )
    monkeypatch.setenv("GATEWAY_CACHE_MAX_MODELS", "2")
    assert run("check") == 0
    assert "note" not in capsys.readouterr().out


def test_wrong_settings_end_every_command_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GATEWAY_PORT", "99999")
    for command in ("check", "config", "models"):
        assert run(command) == 2
        assert capsys.readouterr().err.startswith("GATEWAY_PORT=99999: should be less than")


def test_wrong_usage_ends_with_2() -> None:
    assert run("chekc") == 2
    assert run("check", "--modells", "x") == 2


def test_config_prints_value_and_source(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "models.yaml").write_text(GOOD.replace("hub:org/name", "${GATEWAY_M_SOURCE:-hub:a/b}"))
    (here / ".env").write_text("GATEWAY_DRAIN_S=5\n")
    monkeypatch.setenv("GATEWAY_API_KEYS", "hunter2")
    monkeypatch.setenv("GATEWAY_M_SOURCE", "hub:c/d")
    assert run("config", "--port", "9", "--host", "localhost") == 0
    out = capsys.readouterr().out
    lines = dict(line.split("\t", 1) for line in out.splitlines())
    assert lines["GATEWAY_PORT"] == "9\tflag"
    assert lines["GATEWAY_HOST"] == "localhost\tflag"
    assert lines["GATEWAY_DRAIN_S"] == "5\t.env"
    assert lines["GATEWAY_API_KEYS"] == "**********\tenvironment"
    assert lines["GATEWAY_QUEUE_LIMIT"] == "256\tdefault"
    assert lines["GATEWAY_M_SOURCE"] == "hub:c/d\tenvironment"
    assert "hunter2" not in out


def test_config_prints_the_variables_of_models_keys(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variable that sets no key is a note with the nearest name that would."""
    (here / "models.yaml").write_text(GOOD)
    (here / ".env").write_text("GATEWAY_M_MAX_CONTEXT=64\nGATEWAY_M_TOP_K=5\n")
    monkeypatch.setenv("GATEWAY_M_SAMPLING_MAX_TOKENS", "7")
    monkeypatch.setenv("GATEWAY_M_CHAT_TEMPLATE_KWARGS_LANG", "en")
    secrets = ("APIKEY", "API_KEYS", "AUTH_TOKEN_IDS", "PASS")
    for name in secrets:
        monkeypatch.setenv(f"GATEWAY_M_CHAT_TEMPLATE_KWARGS_{name}", "hunter2")
    monkeypatch.setenv("GATEWAY_M_THINKNG", "true")
    assert run("config") == 0
    out, err = capsys.readouterr()
    own = sorted(line for line in out.splitlines() if line.startswith("GATEWAY_M_"))
    hidden = [f"GATEWAY_M_CHAT_TEMPLATE_KWARGS_{name}\t**********\tenvironment" for name in secrets]
    assert not set(hidden) - set(own)
    assert [line for line in own if line not in hidden] == [
        "GATEWAY_M_CHAT_TEMPLATE_KWARGS_LANG\ten\tenvironment",
        "GATEWAY_M_MAX_CONTEXT\t64\t.env",
        "GATEWAY_M_SAMPLING_MAX_TOKENS\t7\tenvironment",
    ]
    nothing = "is set, and nothing reads it; did you mean"
    assert f"note: GATEWAY_M_TOP_K {nothing} GATEWAY_M_SAMPLING_TOP_K?" in err
    assert f"note: GATEWAY_M_THINKNG {nothing} GATEWAY_M_THINKING?" in err


def test_config_works_while_the_file_does_not(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "models.yaml").write_text("a: [")
    assert run("config") == 0
    assert "GATEWAY_MODELS\tmodels.yaml\tdefault" in capsys.readouterr().out


def test_models_lists_what_is_served(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "w").mkdir()
    (here / "w" / "config.json").write_text("{}")
    (here / "w" / "model.safetensors").write_bytes(bytes(3_499_998))
    (here / "w" / "notes.md").write_text("no file of a model")
    (here / "models.yaml").write_text(GOOD + "  p: {kind: embedding, source: 'path:w'}\n")
    assert run("models") == 0
    m, p = capsys.readouterr().out.splitlines()
    assert m.split("\t") == ["m", "chat", "n", "hub:org/name", "no", ""]
    folder = f"path:{(here / 'w').resolve()}"
    assert p.split("\t") == ["p", "embedding", "", folder, "yes", "3 MiB"]


def listed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Give the report of `models` on each: on disk or not, and its size."""
    assert run("models") == 0
    return [" ".join(line.split("\t")[4:]) for line in capsys.readouterr().out.splitlines()]


def test_a_hub_model_is_on_disk_when_all_its_shards_are(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = "a" * 40
    (here / "models.yaml").write_text(GOOD.replace("org/name", f"org/name@{commit}"))
    monkeypatch.setenv("GATEWAY_HUB_CACHE", str(here))
    repo = here / "models--org--name"
    snapshot = repo / "snapshots" / commit
    assert listed(capsys) == ["no "]
    (repo / "blobs").mkdir(parents=True)
    (repo / "blobs" / "b.part").write_bytes(bytes(5_000_000))
    assert listed(capsys) == ["in part 5 MiB"]
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    index = snapshot / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    (snapshot / "1.safetensors").write_bytes(b"")
    assert listed(capsys) == ["in part 5 MiB"]
    (snapshot / "2.safetensors").write_bytes(b"")
    assert listed(capsys) == ["yes 62 B"]
    index.write_text("[]")
    assert listed(capsys) == ["in part 5 MiB"]


def test_commands_that_only_look_import_no_mlx(here: Path) -> None:
    """They answer at once, and still name the faults where mlx doesn't work."""
    (here / "models.yaml").write_text(GOOD + "  own: {kind: chat, source: 'path:.'}\n")
    commands = [
        *(["--help"], ["serve", "--help"], ["check"], ["config"], ["schema"], ["models"]),
        *(["pull", "own"], ["models", "recommend", "--memory", "64GB"], ["doctor"]),
    ]
    code = f"""
import sys
from gateway.cli import main
for arguments in {commands!r}:
    try:
        main(arguments)
    except SystemExit as ended:
        assert not ended.code, (arguments, ended.code)
    imported = [name for name in {HEAVY!r} if name in sys.modules]
    print(arguments, "imports", imported, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(NO_COLOR="1", **NOWHERE),
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if " imports " in line]
    assert told == [f"{arguments} imports []" for arguments in commands]


def test_python_m_gateway_is_the_command(here: Path) -> None:
    done = ran(here, "check", "--models", "none.yaml")
    assert done.returncode == 1
    assert done.stderr == "none.yaml: No such file or directory\n"


@pytest.fixture
def hangups() -> Iterator[None]:
    """Let SIGHUP through again, which `serve` holds back until it can handle it."""
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have mlx see no GPU, on whatever machine this is."""
    for back_end in (mx.metal, mx.cuda):
        monkeypatch.setattr(back_end, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu", "hangups")
@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_gpu_that_is_not_there_is_a_wrong_setting(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (here / "models.yaml").write_text(GOOD)
    monkeypatch.setenv("GATEWAY_DEVICE", "gpu")
    assert run(command) == 2
    assert capsys.readouterr().err.splitlines() == [
        "GATEWAY_DEVICE=gpu: this mlx sees neither Metal nor CUDA; auto takes the CPU"
    ]


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("command", ["serve", "check"])
def test_tls_files_that_are_no_pem_are_wrong_settings(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (here / "models.yaml").write_text(GOOD)
    for name in ("CERT", "KEY"):
        (here / f"{name}.pem").write_text("no PEM")
        monkeypatch.setenv(f"GATEWAY_TLS_{name}", f"{name}.pem")
    assert run(command) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("GATEWAY_TLS_CERT=CERT.pem and GATEWAY_TLS_KEY=KEY.pem: should be a ")
