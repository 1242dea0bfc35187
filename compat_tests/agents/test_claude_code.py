"""The terminal agent `claude`, as npm has it, against a scripted model: it needs no login."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import orjson
import pytest

from compat_tests.agents.model import MODEL, serving
from compat_tests.node import NEEDS_NODE

pytestmark = [pytest.mark.anyio, pytest.mark.compat, NEEDS_NODE]
ASKED = "Run `echo hello from $((40 + 2))` and say what it prints."


class Terminal:
    """An empty home and an empty folder, in which the agent is started."""

    def __init__(self, programs: Path, folder: Path, **environment: str) -> None:
        self._claude = ("node", str(programs / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"))
        self._folder = folder / "project"
        self._folder.mkdir()
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            **environment,
        }

    async def ask(self, *arguments: str) -> dict[str, Any]:
        """Ask without a screen, and return the reported outcome."""
        process = await asyncio.create_subprocess_exec(
            *self._claude, "-p", *arguments, "--allowedTools", "Bash", "--output-format", "json",
            cwd=self._folder,
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(120):
                printed, errors = await process.communicate()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert printed, errors.decode()
        outcome: dict[str, Any] = orjson.loads(printed)
        return outcome


async def test_two_turns_with_a_tool_call(installed: Path, tmp_path: Path) -> None:
    """It runs the command that the model asks for, sends the output back, and goes on."""
    async with serving(tmp_path) as (client, chat):
        terminal = Terminal(
            installed, tmp_path, ANTHROPIC_BASE_URL=str(client.base_url), ANTHROPIC_API_KEY="unused"
        )
        outcome = await terminal.ask(ASKED)
        assert not outcome["is_error"], outcome
        assert outcome["result"] == "It printed: hello from 42"
        assert (outcome["num_turns"], outcome["stop_reason"]) == (2, "end_turn")
        first, second = (job for job in chat.jobs if job.tools)
        # The agent's own system message stands after the question.
        assert [turn["role"] for turn in first.messages] == ["system", "user", "system"]
        assert first.template_args["enable_thinking"] is True
        call, result = second.messages[3:]
        assert (call["content"], call["reasoning_content"]) == (
            "I will run that.", "A command, so run it.",
        )  # fmt: skip
        assert call["tool_calls"][0]["function"]["name"] == "Bash"
        assert (result["role"], result["content"]) == ("tool", "hello from 42")
        # Both sides count the same tokens.
        usage = outcome["modelUsage"][MODEL]
        assert usage["outputTokens"] == 6 + 5 + 1
        assert usage["inputTokens"] > 10_000

        outcome = await terminal.ask("--continue", "Now run `echo again`.")
        assert outcome["result"] == "It printed: again", outcome
        assert second.messages[-1] in chat.jobs[-1].messages


async def test_a_key_is_sent_either_way(installed: Path, tmp_path: Path) -> None:
    """The key is sent as x-api-key or as a bearer token."""
    async with serving(tmp_path, api_keys="k") as (client, _):
        for number, name in enumerate(("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")):
            home = tmp_path / str(number)
            home.mkdir()
            environment = {"ANTHROPIC_BASE_URL": str(client.base_url), name: "k"}
            outcome = await Terminal(installed, home, **environment).ask("Hello")
            assert outcome["result"] == "There is nothing to run.", outcome


async def test_a_model_that_is_not_there_is_said_to_be(installed: Path, tmp_path: Path) -> None:
    """The agent reports it, in words of its own."""
    async with serving(tmp_path) as (client, _):
        terminal = Terminal(
            installed, tmp_path, ANTHROPIC_BASE_URL=str(client.base_url),
            ANTHROPIC_API_KEY="unused", ANTHROPIC_MODEL="claude-unknown",
        )  # fmt: skip
        outcome = await terminal.ask("Hello")
        assert outcome["is_error"]
        assert outcome["api_error_status"] == 404
        assert "claude-unknown" in outcome["result"]
