"""`mlx-gateway launch` and `connect` with their tools, the real ones, on a scripted model."""

import asyncio
import os
import platform
import re
import signal
import struct
import sys
import zlib
from pathlib import Path

import httpx2
import orjson
import pytest

from compat_tests.agents.model import MODEL, ScriptedAgent, serving
from compat_tests.node import NEEDS_NODE
from tests.processes import ROOT, environment

pytestmark = [pytest.mark.anyio, pytest.mark.compat]
LLM = ROOT / ".venv-clients" / "bin" / "llm"
AIDER = ROOT / ".venv-aider" / "bin" / "aider"
KEY = "the-gateways-key"
ASKED = "Run `echo hello from $((40 + 2))` and say what it prints."
CLAUDE = ("-p", ASKED, "--allowedTools", "Bash", "--output-format", "json")
# The tests' own folder is the sandbox.
CODEX = ("exec", "--json", "--skip-git-repo-check", "-s", "danger-full-access", ASKED)
OPENCODE = ("run", "--format", "json", ASKED)
SHELL = """
import subprocess

def bash(command: str, description: str) -> str:
    "Run a command."
    return subprocess.check_output(["sh", "-c", command], text=True)
"""
LAUNCH = 'exec "$PYTHON" -m gateway launch "$1" -- "${@:2}"'
CONNECT = 'settings=$("$PYTHON" -m gateway connect "$1") && eval "$settings" && "$@"'
BOTH = pytest.mark.parametrize("by", [LAUNCH, CONNECT], ids=["launch", "connect"])
ALONE = {  # nothing is asked of any other host
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "COPILOT_OFFLINE": "true",
    "PI_OFFLINE": "1",
    "CONTINUE_METRICS_ENABLED": "0",
    "AIDER_ANALYTICS": "false",
    "AIDER_CHECK_UPDATE": "false",
}
MACHINE = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
SYSTEM = f"{sys.platform}-{MACHINE}"


async def run(
    program: Path, home: Path, client: httpx2.AsyncClient, *arguments: str, by: str = LAUNCH
) -> bytes:
    """Run a tool on the gateway of a client, from an empty home; return its output."""
    port = client.base_url.port
    assert port is not None
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", by, "bash", program.name, *arguments),
        cwd=home,
        env=environment(
            PATH=f"{program.parent}:{os.environ['PATH']}",
            PYTHON=sys.executable,
            HOME=str(home),
            GATEWAY_PORT=str(port),
            GATEWAY_API_KEYS=KEY,
            **ALONE,
        ),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(120):
            printed, errors = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, (printed + errors).decode()
    return printed


def files_with_key(folder: Path) -> list[Path]:
    """List the files below a folder that have the gateway's key."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [file for file in files if KEY.encode() in file.read_bytes()]


def claude_in(installed: Path, folder: Path) -> Path:
    """Write a program that runs Claude Code."""
    claude = folder / "claude"
    wrapper = installed / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"
    claude.write_text(f'#!/bin/sh\nexec node "{wrapper}" "$@"\n')
    claude.chmod(0o755)
    return claude


@NEEDS_NODE
async def test_claude_code_runs_a_command(installed: Path, tmp_path: Path) -> None:
    """It has a key, and uses the model that launch chose."""
    claude = claude_in(installed, tmp_path)
    async with serving(tmp_path, api_keys=KEY) as (client, _):
        outcome = orjson.loads(await run(claude, tmp_path, client, *CLAUDE))
    assert outcome["result"] == "It printed: hello from 42", outcome
    assert set(outcome["modelUsage"]) == {MODEL}


@NEEDS_NODE
async def test_codex_runs_a_command(installed: Path, tmp_path: Path) -> None:
    """It uses /v1/responses: its call, the call's result, and the answer to that."""
    async with serving(tmp_path, api_keys=KEY) as (client, chat):
        printed = await run(installed / ".bin" / "codex", tmp_path, client, *CODEX)
    items = [line["item"] for line in map(orjson.loads, printed.splitlines()) if "item" in line]
    assert [item["text"] for item in items if item["type"] == "agent_message"][-1].endswith(
        "hello from 42"
    ), items
    (ran,) = (i for i in items if i["type"] == "command_execution" and i["status"] == "completed")
    assert (ran["exit_code"], ran["aggregated_output"]) == (0, "hello from 42\n")
    assert [turn["role"] for turn in chat.jobs[-1].messages][-2:] == ["assistant", "tool"]


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """Write a PNG of 64 red pixels by 64 into the home; some agents enlarge smaller ones."""
    pieces = (
        (b"IHDR", struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(64 * (b"\0" + 64 * b"\xff\0\0"))),
        (b"IEND", b""),
    )
    text = b"\x89PNG\r\n\x1a\n"
    for name, data in pieces:
        end = struct.pack(">I", zlib.crc32(name + data))
        text += struct.pack(">I", len(data)) + name + data + end
    (tmp_path / "red.png").write_bytes(text)
    return tmp_path / "red.png"


SEES = pytest.mark.parametrize("sees", [False, True], ids=["text", "sees"])


def shown(chat: ScriptedAgent) -> list[bytes]:
    """Return the images of the last request."""
    return [image.data for image in chat.jobs[-1].images]


@NEEDS_NODE
@SEES
async def test_a_session_of_claude_code_goes_on_after_a_picture(
    installed: Path, tmp_path: Path, picture: Path, sees: bool
) -> None:
    """A model that sees is shown it both times; for another the agent takes it out at the refusal,
    whose words it knows, and asks again.
    """
    asked = ("-p", f"What is in @{picture.name}?", "--output-format", "json")
    later = ("-p", "--continue", ASKED, "--allowedTools", "Bash", "--output-format", "json")
    async with serving(tmp_path, sees=sees, api_keys=KEY) as (client, chat):
        claude = claude_in(installed, tmp_path)
        first = orjson.loads(await run(claude, tmp_path, client, *asked))
        assert len(shown(chat)) == sees
        second = orjson.loads(await run(claude, tmp_path, client, *later))
    assert (first["is_error"], second["result"]) == (False, "It printed: hello from 42")
    assert len(shown(chat)) == sees


@NEEDS_NODE
@SEES
async def test_a_session_of_codex_goes_on_after_a_picture(
    installed: Path, tmp_path: Path, picture: Path, sees: bool
) -> None:
    """It has no warning, and sends the picture if the catalog says that the model reads images."""
    codex, options = installed / ".bin" / "codex", CODEX[:-1]
    async with serving(tmp_path, sees=sees, api_keys=KEY) as (client, chat):
        pictured = (*options, "-i", picture.name, "--", "What is this?")
        first = await run(codex, tmp_path, client, *pictured)
        second = await run(codex, tmp_path, client, *options, "resume", "--last", ASKED)
    assert b"Model metadata" not in first + second
    assert b"hello from 42" in second
    assert ("image content omitted" in str(chat.jobs[-1].messages)) is not sees
    assert len(shown(chat)) == sees


@NEEDS_NODE
@SEES
@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("claude", ("-p",), ("--allowedTools", "Read")),
        (".bin/codex", CODEX[:-1], ()),
        (f"opencode-{SYSTEM}/bin/opencode", OPENCODE[:-1], ()),
        (".bin/pi", ("-p",), ()),
        (f"@cline/cli-{SYSTEM}/bin/cline", (), ()),
    ],
    ids=["claude", "codex", "opencode", "pi", "cline"],
)
async def test_a_picture_that_an_agent_looks_at_is_shown_to_a_model_that_sees_alone(
    installed: Path,
    tmp_path: Path,
    picture: Path,
    path: str,
    before: tuple[str, ...],
    after: tuple[str, ...],
    sees: bool,
) -> None:
    """Its own tool reads the file. Either model's answer comes, and no request is refused."""
    program = claude_in(installed, tmp_path) if path == "claude" else installed / path
    if not program.exists():
        pytest.skip(f"package-lock.json has no {path}")
    arguments = (*before, f"Please look at `{picture}`.", *after)
    async with serving(tmp_path, sees=sees, api_keys=KEY) as (client, chat):
        printed = await run(program, tmp_path, client, *arguments)
        metrics = (await client.get("/metrics")).text
    assert b"It printed: " in printed
    assert len(shown(chat)) == sees
    assert not re.search(r'gateway_requests_total{[^}]*status="400"', metrics)


@NEEDS_NODE
@BOTH
async def test_opencode_runs_a_command(installed: Path, tmp_path: Path, by: str) -> None:
    """It uses /v1/chat/completions, its own tool and our model alone."""
    program = installed / f"opencode-{SYSTEM}" / "bin" / "opencode"
    if not program.exists():
        pytest.skip(f"package-lock.json has no opencode for {SYSTEM}")
    async with serving(tmp_path, api_keys=KEY) as (client, chat):
        printed = await run(program, tmp_path, client, *OPENCODE, by=by)
    parts = [line["part"] for line in map(orjson.loads, printed.splitlines()) if "part" in line]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    assert texts[-1].strip() == "It printed: hello from 42", printed
    (ran,) = (part for part in parts if part["type"] == "tool")
    assert (ran["tool"], ran["state"]["output"].strip()) == ("bash", "hello from 42")
    assert [turn["role"] for turn in chat.jobs[-1].messages][-2:] == ["assistant", "tool"]


@pytest.mark.skipif(not LLM.exists(), reason="`make setup-clients` installs it")
@BOTH
async def test_llm_calls_a_function(tmp_path: Path, by: str) -> None:
    """One of its user's own, streamed; its folder in the user's home stays as it was."""
    arguments = ("--functions", SHELL, "--tools-debug", ASKED)
    async with serving(tmp_path, api_keys=KEY) as (client, chat):
        printed = (await run(LLM, tmp_path, client, *arguments, by=by)).decode()
    assert printed.strip().endswith("It printed: hello from 42"), printed
    first, second = chat.jobs
    assert [tool["function"]["name"] for tool in first.tools] == ["bash"]
    assert [turn["role"] for turn in second.messages] == ["user", "assistant", "tool"]
    assert not (tmp_path / ".config" / "io.datasette.llm").exists()


@NEEDS_NODE
@BOTH
@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        (f"@github/copilot-{SYSTEM}/copilot", ("-s", "--allow-all-tools", "-p", ASKED)),
        (".bin/qwen", ("-y", ASKED)),
        (".bin/pi", ("-p", ASKED)),  # runs on the Node beside it, 22
        (".bin/cn", ("--auto", "-p", ASKED)),
        (f"@cline/cli-{SYSTEM}/bin/cline", (ASKED,)),
    ],
    ids=["copilot", "qwen", "pi", "cn", "cline"],
)
async def test_an_agent_runs_a_command_and_writes_no_key(
    installed: Path, tmp_path: Path, path: str, arguments: tuple[str, ...], by: str
) -> None:
    """It uses /v1/chat/completions, and asks for a quarter of the context at most."""
    if not (installed / path).exists():
        pytest.skip(f"package-lock.json has no {path}")
    async with serving(tmp_path, api_keys=KEY) as (client, chat):
        printed = (await run(installed / path, tmp_path, client, *arguments, by=by)).decode()
    assert "It printed: " in printed, printed
    # Qwen Code 0.24.4 may miss what a quick command prints, on a machine with much to do.
    assert "hello from 42" in printed or ("qwen" in path and "Output: (empty)" in printed), printed
    assert any(
        [turn["role"] for turn in job.messages][-2:] == ["assistant", "tool"] for job in chat.jobs
    )
    assert all((job.max_tokens or 0) <= chat.max_context // 4 for job in chat.jobs)
    assert not files_with_key(tmp_path)


@pytest.mark.skipif(not AIDER.exists(), reason="`make setup-aider` installs it")
@BOTH
async def test_aider_asks_whatever_the_project_says(tmp_path: Path, by: str) -> None:
    """A project's .env goes before the environment, but not before launch's own arguments."""
    (tmp_path / ".env").write_text("OPENAI_API_BASE=http://127.0.0.1:9/v1\nOPENAI_API_KEY=theirs\n")
    arguments = ("--no-git", "--yes-always", "--message", "Hello")
    async with serving(tmp_path, api_keys=KEY) as (client, chat):
        printed = (await run(AIDER, tmp_path, client, *arguments, by=by)).decode()
    assert f"Model: openai/{MODEL}" in printed
    assert "There is nothing to run." in printed
    assert chat.jobs[-1].messages[-1]["content"].startswith("Hello")
