"""A scripted chat model that an agent can work with: it has the agent run a command or look at a
picture, once.

`python -m compat_tests.agents.model` serves it until it is interrupted.
"""

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import orjson

from gateway.jobs.chat import CallDelta, Delta, GenerateJob
from gateway.jobs.steps import ImageCost, SequenceParams
from tests.fakes import ScriptedChat, ScriptedEngines, ScriptedRow
from tests.serving_app import catalog, served

MODEL = "scripted"
SHELLS = {
    "Bash": "command",  # Claude Code and cn
    "exec_command": "cmd",  # Codex
    "bash": "command",  # opencode, pi and Copilot
    "run_shell_command": "command",  # Qwen Code
    "run_commands": "commands",  # Cline; a list
}
"""The tools that run a command, and what each calls it."""
COMMAND = re.compile(r"`(echo [^`]+)`")
VIEWERS = ("Read", "view_image", "read", "read_files")
"""The tools that read a picture: Claude Code's, Codex', opencode's and pi's, Cline's."""
PICTURE = re.compile(r"look at `([^`]+)`")


@dataclass
class ScriptedAgent(ScriptedChat):
    """Has the agent's tools run an `echo` in backquotes or read a file, and repeats their output.

    It thinks first, announces the call, and titles a conversation if it is asked for JSON.
    """

    max_context: int = 1_000_000
    plans: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def prepare(self, job: GenerateJob) -> list[SequenceParams]:
        """Return one row, whose prompt is the whole conversation, a token a character."""
        self.jobs.append(job)
        conversation = {
            "turns": job.messages,
            "tools": {tool["function"]["name"]: _first_argument(tool) for tool in job.tools},
            "is_json": job.grammar is not None,
        }
        text = orjson.dumps(conversation).decode()
        room = self.max_context - len(text)
        row = SequenceParams(
            prompt=[ord(character) for character in text],
            max_tokens=min(job.max_tokens or room, room),
            sampling=job.sampling,
        )
        return [row]

    def join(self, number: int, params: SequenceParams) -> None:
        super().join(number, params)
        self.plans[number] = _plan(orjson.loads("".join(map(chr, params.prompt))))

    def _next(self, number: int, row: ScriptedRow) -> Delta:
        delta = self.plans[number].pop(0)
        if not self.plans[number]:
            del self.scripted[number]
        return Delta(row.params.index, id=number, tokens=1, **delta)


class SeeingAgent(ScriptedAgent):
    """The same, which reads images."""

    images = ImageCost()


def _first_argument(tool: Mapping[str, Any]) -> str:
    properties = (tool["function"].get("parameters") or {}).get("properties") or {}
    return next(iter(properties), "")


def _plan(conversation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the deltas of the answer."""
    turns = conversation["turns"]
    if conversation["is_json"]:
        return [{"text": '{"title": "A greeting"}', "finish_reason": "stop"}]
    # What the agent adds of its own accord may stand after either.
    last = next((turn for turn in reversed(turns) if _is_answerable(turn)), None)
    shell = next((name for name in SHELLS if name in conversation["tools"]), None)
    if last is None or shell is None:
        return [{"text": "There is nothing "}, {"text": "to run."}, {"finish_reason": "stop"}]
    if last["role"] == "tool":
        words = re.split(r"(?<= )", f"It printed: {last['content'].strip()}")
        return [*({"text": word} for word in words), {"finish_reason": "stop"}]
    name, given = shell, {}
    if pictures := PICTURE.findall(last["content"]):
        name = next(each for each in VIEWERS if each in conversation["tools"])
        first = conversation["tools"][name]
        given = {first: [{"path": pictures[-1]}] if first == "files" else pictures[-1]}
    else:
        command = COMMAND.findall(last["content"])[-1]
        given = {SHELLS[shell]: [command] if SHELLS[shell] == "commands" else command}
        if SHELLS[shell] == "command":
            given["description"] = "Run it"
    arguments = orjson.dumps(given).decode()
    middle = len(arguments) // 2
    return [
        {"reasoning": "A command, ", "reasoning_tokens": 1},
        {"reasoning": "so run it.", "reasoning_tokens": 1},
        {"text": "I will run that."},
        {"call": CallDelta(0, f"call_{len(turns)}", name, arguments[:middle])},
        {"call": CallDelta(0, arguments=arguments[middle:])},
        {"finish_reason": "tool_calls"},
    ]


def _is_answerable(turn: Mapping[str, Any]) -> bool:
    """Return True for a tool's result, and for a user's turn that asks for a call."""
    asks = any(pattern.search(turn["content"] or "") for pattern in (COMMAND, PICTURE))
    return turn["role"] == "tool" or (turn["role"] == "user" and asks)


@asynccontextmanager
async def serving(
    folder: Path, *, sees: bool = False, **given: Any
) -> AsyncIterator[tuple[httpx2.AsyncClient, ScriptedAgent]]:
    """Serve the model, and give a client of the gateway, and the requests of the model."""
    chat = SeeingAgent() if sees else ScriptedAgent()
    models = catalog(folder, {MODEL: {"kind": "chat", "source": "path:.", "preload": True}})
    async with served(models, ScriptedEngines(chat=chat), **given) as client:
        yield client, chat


async def _serve() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder)) as (client, _):
            print(client.base_url, flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve())
