"""bench, as a command: its table, its JSON, its status; and what it imports."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.bench import EMBEDDER, WRITER
from tests.fakes import ScriptedChat, ScriptedEngines
from tests.processes import ROOT, command, environment
from tests.serving_app import catalog, served

MODELS: dict[str, dict[str, Any]] = {
    "embedder": {"kind": "embedding", "source": "path:.", "aliases": [EMBEDDER]},
    "writer": {"kind": "chat", "source": "path:.", "aliases": [WRITER]},
}
QUICK = ("--duration", "0.3", "--warmup", "0", "--words", "3", "--prompt-words", "3")


async def bench(*arguments: str, stderr: int = subprocess.PIPE) -> tuple[int, str, str]:
    """Run the command beside the server under test; give status, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *command("bench", *arguments),
        cwd=ROOT,
        env=environment(NO_COLOR="1"),
        stdout=subprocess.PIPE,
        stderr=stderr,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), (err or b"").decode()


def engines() -> ScriptedEngines:
    return ScriptedEngines(chat=ScriptedChat(max_context=1000))


@pytest.mark.anyio
async def test_a_line_for_each_number_of_clients(tmp_path: Path) -> None:
    async with served(catalog(tmp_path, MODELS), engines()) as client:
        url = str(client.base_url)
        status, out, err = await bench("embeddings", "--url", url, "--concurrency", "1,3", *QUICK)
    assert (status, err) == (0, "")
    rows = [line.split("\t") for line in out.splitlines()]
    assert [row[0] for row in rows] == ["1", "3"]
    assert all(float(row[1]) > 0 for row in rows)
    assert all(row[2].endswith(" vectors") for row in rows)
    assert [row[-3:] for row in rows] == [["–", "–", "0"]] * 2


@pytest.mark.anyio
async def test_json_says_all_that_was_measured(tmp_path: Path) -> None:
    async with served(catalog(tmp_path, MODELS), engines()) as client:
        status, out, _ = await bench(
            *("chat", "--url", str(client.base_url), "--concurrency", "2", "--seed", "7"),
            *("--json", *QUICK),
        )
    assert status == 0
    told = json.loads(out)
    assert (told["kind"], told["seed"], told["duration_s"]) == ("chat", 7, 0.3)
    [result] = told["results"]
    assert result["clients"] == 2
    assert result["errors"] == {}
    assert result["tokens_per_s"] > result["requests_per_s"] > 0
    for spread in (result["latency_ms"], result["first_token_ms"]):
        assert 0 < spread["p50"] <= spread["p95"] <= spread["p99"]


@pytest.mark.anyio
async def test_errors_under_load_are_counted_by_name(tmp_path: Path) -> None:
    async with served(catalog(tmp_path, MODELS), engines(), queue_limit=1) as client:
        url = str(client.base_url)
        status, out, _ = await bench("embeddings", "--url", url, "--concurrency", "3", *QUICK)
    assert status == 1
    row, note = out.splitlines()
    count = row.split("\t")[-1]
    assert note == f"3 clients: {count} × 429 rate_limit_exceeded"


@pytest.mark.anyio
async def test_nobody_there_is_told_in_one_line() -> None:
    status, out, err = await bench("chat", "--url", "http://127.0.0.1:9", *QUICK)
    assert (status, out) == (1, "")
    assert err == "The first request failed: cannot connect.\n"


@pytest.mark.anyio
@pytest.mark.parametrize(
    "arguments",
    [
        ("juggling",),
        ("chat", "--concurrency", "0"),
        ("chat", "--concurrency", "1,x"),
        ("embeddings", "--words", ""),
        ("mixed",),
    ],
)
async def test_wrong_usage_ends_with_2(arguments: tuple[str, ...]) -> None:
    status, out, err = await bench(*arguments)
    assert (status, out) == (2, "")
    assert "Usage" in err


def test_the_load_needs_no_mlx() -> None:
    code = """
import sys
from gateway.cli import main
try:
    main(["bench", "--help"])
except SystemExit as ended:
    assert not ended.code
light = {"mlx", "aiohttp", "jsonschema", "numpy"} & sys.modules.keys()
import gateway.bench.load
heavy = {"mlx", "mlx_lm", "transformers", "outlines"} & sys.modules.keys()
print(light, heavy, file=sys.stderr)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "set() set()\n"


WITHOUT_AIOHTTP = "import sys; sys.modules['aiohttp'] = None; from gateway.cli import main; "


def test_without_the_load_tools_extra_bench_names_it_in_one_line() -> None:
    done = python(WITHOUT_AIOHTTP + "main(['bench', 'chat'])")
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr
        == "mlx-gateway bench needs aiohttp, of the extra `bench`: pip install aiohttp\n"
    )


def test_what_serves_and_what_examines_the_engine_need_no_load_tool() -> None:
    rooms = "import gateway.app.gateway, gateway.cli.serve, gateway.doctor.trial"
    done = python(WITHOUT_AIOHTTP + rooms)
    assert done.returncode == 0, done.stderr


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(NO_COLOR="1"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
