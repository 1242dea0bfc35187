"""bench, as a command: its table, its JSON, its status, and its imports."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal
from structlog.testing import capture_logs

from gateway.cli.bench import EMBEDDER, WRITER
from tests.cli.conftest import Inside
from tests.fakes import ScriptedChat, ScriptedEngines
from tests.processes import ROOT, environment, ran
from tests.serving_app import catalog, served

MODELS: dict[str, dict[str, Any]] = {
    "embedder": {"kind": "embedding", "source": "path:.", "aliases": [EMBEDDER]},
    "writer": {"kind": "chat", "source": "path:.", "aliases": [WRITER]},
}
QUICK = ("--duration", "0.3", "--warmup", "0", "--words", "3", "--prompt-words", "3")


@pytest.fixture
def url(request: pytest.FixtureRequest, portal: BlockingPortal, tmp_path: Path) -> Iterator[str]:
    """Serve scripted models, with the settings that a test gives; give the address."""
    engines = ScriptedEngines(chat=ScriptedChat(max_context=1000))
    gateway = served(catalog(tmp_path, MODELS), engines, **getattr(request, "param", {}))
    with capture_logs(), portal.wrap_async_context_manager(gateway) as client:
        yield str(client.base_url)


def test_a_line_for_each_number_of_clients(url: str) -> None:
    done = ran(ROOT, "bench", "embeddings", "--url", url, "--concurrency", "1,3", *QUICK)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["1", "3"]
    assert all(float(row[1]) > 0 for row in rows)
    assert all(row[2].endswith(" vectors") for row in rows)
    assert [row[-3:] for row in rows] == [["–", "–", "0"]] * 2


def test_json_says_all_that_was_measured(url: str, inside: Inside) -> None:
    asked = ("--url", url, "--concurrency", "2", "--seed", "7", "--json")
    done = inside(ROOT, "bench", "chat", *asked, *QUICK)
    assert done.returncode == 0
    told = json.loads(done.stdout)
    assert (told["kind"], told["seed"], told["duration_s"]) == ("chat", 7, 0.3)
    [result] = told["results"]
    assert result["clients"] == 2
    assert result["errors"] == {}
    assert result["tokens_per_s"] > result["requests_per_s"] > 0
    for spread in (result["latency_ms"], result["first_token_ms"]):
        assert 0 < spread["p50"] <= spread["p95"] <= spread["p99"]


@pytest.mark.parametrize("url", [{"queue_limit": 1}], indirect=True)
def test_errors_under_load_are_counted_by_name(url: str, inside: Inside) -> None:
    done = inside(ROOT, "bench", "embeddings", "--url", url, "--concurrency", "3", *QUICK)
    assert done.returncode == 1
    row, note = done.stdout.splitlines()
    count = row.split("\t")[-1]
    assert note == f"3 clients: {count} × 429 rate_limit_exceeded"


@pytest.mark.parametrize("url", [{"api_keys": "own,other"}], indirect=True)
def test_without_an_address_the_gateway_of_the_settings_is_asked(url: str, inside: Inside) -> None:
    """By the port and keys that `serve` would take, unless another key is given."""
    port = url.rstrip("/").rpartition(":")[2]
    own = {"GATEWAY_PORT": port, "GATEWAY_API_KEYS": "own,other", "OPENAI_API_KEY": "another's"}
    asked = ("bench", "embeddings", "--concurrency", "1", *QUICK)
    assert inside(ROOT, *asked, **own).returncode == 0
    refused = inside(ROOT, *asked, "--api-key", "wrong", **own)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("The first request failed: 401 ")
    by_variable = {"GATEWAY_PORT": port, "OPENAI_API_KEY": "other"}
    assert inside(ROOT, *asked, **by_variable).returncode == 0
    unknown = inside(ROOT, *asked, GATEWAY_PORT="0")
    assert unknown.returncode == 1
    nobody, step = "No gateway answers at", "Name its --url, or run:\n  mlx-gateway serve\n"
    assert unknown.stderr == f"{nobody} a known port. {step}"
    nobody += " http://127.0.0.1:9."
    assert inside(ROOT, *asked, GATEWAY_PORT="9").stderr == f"{nobody} {step}"


def test_nobody_there_is_told_in_one_line(inside: Inside) -> None:
    done = inside(ROOT, "bench", "chat", "--url", "http://127.0.0.1:9", *QUICK)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "The first request failed: cannot connect.\n"


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
def test_wrong_usage_ends_with_2(inside: Inside, arguments: tuple[str, ...]) -> None:
    done = inside(ROOT, "bench", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage" in done.stderr


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


def test_without_the_load_tools_extra_bench_names_it_in_one_line() -> None:
    """Serving and examining the engine do without it."""
    without = "import sys; sys.modules['aiohttp'] = None"
    rooms = "import gateway.app.gateway, gateway.cli.serve, gateway.doctor.trial"
    done = python(f"{without}\n{rooms}\ngateway.cli.main(['bench', 'chat'])")
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr
        == "mlx-gateway bench needs aiohttp, of the extra `bench`: pip install aiohttp\n"
    )


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


def test_images_are_sent_by_their_number(
    portal: BlockingPortal, tmp_path: Path, inside: Inside
) -> None:
    """The writer reads text, so the gateway's refusal counts as an error."""
    engines = ScriptedEngines(chat=ScriptedChat(max_context=1000))
    with capture_logs() as lines:
        gateway = served(catalog(tmp_path, MODELS), engines)
        with portal.wrap_async_context_manager(gateway) as client:
            given = ("--url", str(client.base_url), "--images", "2", *QUICK)
            done = inside(ROOT, "bench", "chat", *given)
    assert done.returncode == 1
    assert "The first request failed: 400" in done.stderr
    assert lines
