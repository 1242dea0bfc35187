"""llama.cpp for the length of a block, as node-llama-cpp brings it from npm: no HTTP, one process.

It is what the prompts cost it in-process, so that its own servers are somewhat slower than this.
"""

import asyncio
import json
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.servers import DidNotStart

SCRIPT = Path(__file__).with_suffix(".mjs")


class LlamaCpp:
    """A model in a process of node, and what its kernels are compiled for."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.kernels = ""

    async def rate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Answer every prompt of token ids in one batch, greedily; give tokens a second."""
        answer = await self.ask({"prompts": prompts, "tokens": max_tokens})
        return float(answer["tokens"] / answer["seconds"])

    async def ask(self, body: Any) -> Any:
        """Write a line and read one; raise DidNotStart if it ended instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if body is not None:
            self._process.stdin.write(json.dumps(body).encode() + b"\n")
        while line := await self._process.stdout.readline():
            if line.startswith(b"{"):
                return json.loads(line)
        assert self._process.stderr is not None
        raise DidNotStart((await self._process.stderr.read()).decode(errors="replace"))


@asynccontextmanager
async def llama_cpp(
    packages: Path, model: Path, *, sequences: int, context: int
) -> AsyncIterator[LlamaCpp]:
    """Load a GGUF file for so many sequences of `context` tokens, all of the machine's threads.

    `packages` is a folder in which `npm install node-llama-cpp` was run. Raises DidNotStart.
    """
    command = ("node", SCRIPT, packages, model, str(sequences), str(context))
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
    except FileNotFoundError as error:
        raise DidNotStart("node is not installed") from error
    try:
        started = LlamaCpp(process)
        started.kernels = (await started.ask(None))["cpu"]
        yield started
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
