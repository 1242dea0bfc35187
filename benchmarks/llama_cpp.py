"""llama.cpp for the length of a block, as node-llama-cpp brings it from npm: no HTTP, one process.

The prompts run in-process, so that its own servers are somewhat slower than this.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.servers import Worker, worker

SCRIPT = Path(__file__).with_suffix(".mjs")


class LlamaCpp:
    """A model in a process of node, and the target that its kernels are compiled for."""

    def __init__(self, node: Worker, kernels: str) -> None:
        self._node = node
        self.kernels = kernels

    async def rate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Answer every prompt of token ids in one batch, greedily; give tokens a second."""
        answer = await self._node.ask({"prompts": prompts, "tokens": max_tokens})
        return float(answer["tokens"] / answer["seconds"])


@asynccontextmanager
async def llama_cpp(
    packages: Path, model: Path, *, sequences: int, context: int
) -> AsyncIterator[LlamaCpp]:
    """Load a GGUF file for a number of sequences of `context` tokens, on all the machine's threads.

    `packages` is a folder in which `npm install node-llama-cpp` was run. Raises DidNotStart.
    """
    async with worker("node", SCRIPT, packages, model, str(sequences), str(context)) as node:
        yield LlamaCpp(node, (await node.ask(None))["cpu"])
