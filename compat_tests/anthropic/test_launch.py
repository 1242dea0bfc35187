"""`mlx-gateway launch` with the real tools: Claude Code and Codex, against a scripted model."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import orjson
import pytest

from compat_tests.anthropic.agent import MODEL, serving
from compat_tests.anthropic.conftest import NEEDS_NODE
from tests.processes import environment

pytestmark = [pytest.mark.anyio, pytest.mark.compat, NEEDS_NODE]
ASKED = "Run `echo hello from $((40 + 2))` and say what it prints."
CLAUDE = ("-p", ASKED, "--allowedTools", "Bash", "--output-format", "json")
# The tests' own folder is the sandbox.
CODEX = ("exec", "--json", "--skip-git-repo-check", "-s", "danger-full-access", ASKED)


async def launched(installed: Path, home: Path, port: int, tool: str, *arguments: str) -> bytes:
    """Launch a tool on the gateway of a port, from an empty home, and give what it printed."""
    programs = home / "bin"
    programs.mkdir()
    claude = programs / "claude"
    wrapper = installed / "claude-code" / "cli-wrapper.cjs"
    claude.write_text(f'#!/bin/sh\nexec node "{wrapper}" "$@"\n')
    claude.chmod(0o755)
    (programs / "codex").symlink_to(installed.parent / ".bin" / "codex")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "launch", tool, "--", *arguments),
        cwd=home,
        env=environment(
            PATH=f"{programs}:{os.environ['PATH']}",
            HOME=str(home),
            GATEWAY_PORT=str(port),
            GATEWAY_API_KEYS="k",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
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


async def test_claude_code_runs_a_command(installed: Path, tmp_path: Path) -> None:
    """With a key, by the model that launch chose."""
    async with serving(tmp_path, api_keys="k") as (client, _):
        port = client.base_url.port
        assert port is not None
        outcome = orjson.loads(await launched(installed, tmp_path, port, "claude", *CLAUDE))
    assert outcome["result"] == "It printed: hello from 42", outcome
    assert set(outcome["modelUsage"]) == {MODEL}


async def test_codex_runs_a_command(installed: Path, tmp_path: Path) -> None:
    """By /v1/responses: its call, the call's result, and the answer to that."""
    async with serving(tmp_path, api_keys="k") as (client, chat):
        port = client.base_url.port
        assert port is not None
        printed = await launched(installed, tmp_path, port, "codex", *CODEX)
    items = [line["item"] for line in map(orjson.loads, printed.splitlines()) if "item" in line]
    assert [item["text"] for item in items if item["type"] == "agent_message"][-1].endswith(
        "hello from 42"
    ), items
    (ran,) = (i for i in items if i["type"] == "command_execution" and i["status"] == "completed")
    assert (ran["exit_code"], ran["aggregated_output"]) == (0, "hello from 42\n")
    assert [turn["role"] for turn in chat.jobs[-1].messages][-2:] == ["assistant", "tool"]
