"""A budget that few rows fit into, over HTTP on real MLX: the others wait, and all are answered."""

import asyncio
from collections.abc import AsyncIterator, Generator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx2
import mlx.core as mx
import pytest

from gateway.app.engines import MlxEngines
from gateway.jobs import KvCost, StepPlan, StepResult
from gateway.registry import ChatSpec
from gateway.serving.generation.memory import Layout, RowCosts
from gateway.serving.ports import GenerationEngine
from tests.checkpoints import write_chat
from tests.cpu_engines import cpu_settings
from tests.fakes import Gate
from tests.provoked.readings import reading
from tests.serving_app import catalog, served

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
TOKENS = 200


@dataclass
class Watched:
    """An engine that reads no prompt while its gate is closed, and counts what it runs."""

    engine: GenerationEngine
    gate: Gate = field(default_factory=Gate)
    joined: int = 0
    steps: list[tuple[int, int]] = field(default_factory=list)
    """How many rows had joined so far, and how many of them a step wrote for."""

    def step(self, plan: StepPlan) -> StepResult:
        self.joined += len(plan.joining)
        if plan.kind == "prefill":
            self.gate.pass_through()
        result = self.engine.step(plan)
        if plan.kind == "decode":
            self.steps.append((self.joined, result.size.rows))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class WatchedEngines(MlxEngines):
    """The real ones; `chat` is the last chat model they loaded."""

    chat: Watched

    def _watched(self, engine: GenerationEngine) -> Any:
        self.chat = Watched(engine)
        return self.chat

    async def generation(
        self, spec: ChatSpec, files: Path
    ) -> Generator[GenerationEngine | None, None, None]:
        steps = await super().generation(spec, files)
        return (engine and self._watched(engine) for engine in steps)


@dataclass
class Tight:
    """A gateway with little room for rows."""

    client: httpx2.AsyncClient
    costs: RowCosts
    engines: WatchedEngines

    async def ask(self, text: str, max_tokens: int | None = TOKENS) -> httpx2.Response:
        body = {
            "model": "chat",
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        return await self.client.post("/v1/chat/completions", json=body)


@asynccontextmanager
async def tight(
    folder: Path,
    models: int,
    layout: Layout,
    config: Mapping[str, Any] = MappingProxyType({}),
    **given: Any,
) -> AsyncIterator[Tight]:
    """Serve two tiny models of random weights, with room for some of them and for these rows."""
    for seed, name in enumerate(("chat", "other")):
        write_chat(folder / name, seed, **config)
    entries = {name: {"kind": "chat", "source": f"path:{name}"} for name in ("chat", "other")}
    engines = WatchedEngines(cpu_settings(kv_allowance_tokens=0))
    read = catalog(folder, entries)
    size = await engines.size(read.specs[0], folder / "chat")
    costs = RowCosts(KvCost(size.kv_token), chunk_tokens=512)
    budget = models * size.weights + layout.nbytes(costs)
    async with served(read, engines, cache_max_bytes=budget, **given) as client:
        yield Tight(client, costs, engines)


async def test_rows_that_do_not_fit_wait_and_answer_as_they_would_alone(tmp_path: Path) -> None:
    """Nine at once where three have room; what is on the device never exceeds what is allowed."""
    texts = [f"tell me about the number {i}" for i in range(9)]
    layout = Layout([TOKENS + 50] * 3)
    async with tight(tmp_path, 1, layout) as gateway:
        alone = [content(await gateway.ask(text)) for text in texts]
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        answers = await asyncio.gather(*(gateway.ask(text) for text in texts))
        assert [answer.status_code for answer in answers] == [200] * 9
        assert [content(answer) for answer in answers] == alone
        counted = layout.nbytes(gateway.costs)
        assert mx.get_peak_memory() - before < 2 * counted, (
            "nine rows would take three times as much"
        )


FLAGS = {
    "type": "object",
    "properties": {
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 46, "maxItems": 46}
    },
    "required": ["flags"],
    "additionalProperties": False,
}


async def test_forty_calls_with_a_huge_bound_run_as_many_as_really_fit(tmp_path: Path) -> None:
    """As Graphiti sends them: structured, 16,384 tokens at the most, some 200 written, in memory
    for 16 such. Greedy and seeded, they say what they say where there is memory for all.
    """

    async def ask(gateway: Tight, number: int) -> httpx2.Response:
        schema = {"name": "flags", "schema": FLAGS, "strict": True}
        body = {
            "model": "chat",
            "messages": [{"role": "user", "content": f"Episode {number}: Alice met Bob. " * 4}],
            "response_format": {"type": "json_schema", "json_schema": schema},
            "temperature": number % 2,
            "seed": number,
            "max_tokens": 16_384,
        }
        return await gateway.client.post("/v1/chat/completions", json=body, timeout=120)

    given = {"structured_rows": 32}
    context = {"max_position_embeddings": 32_768}
    async with tight(tmp_path / "a", 1, Layout([2000] * 41), context, **given) as gateway:
        alike = await asyncio.gather(*(ask(gateway, number) for number in range(40)))
        usages = [answer.json()["usage"] for answer in alike]
        assert all(160 <= usage["completion_tokens"] <= 300 for usage in usages)
    layout = Layout([max(usage["total_tokens"] for usage in usages)] * 16)
    given["prefix_cache_bytes"] = 0  # what is kept would be counted too
    async with tight(tmp_path / "b", 1, layout, context, **given) as gateway:
        (await gateway.ask("loads it", 1)).raise_for_status()
        chat = gateway.engines.chat
        chat.gate.close()
        already = chat.joined
        asked = [asyncio.create_task(ask(gateway, number)) for number in range(40)]
        await have_come(gateway, 40)
        chat.gate.open()
        answers = await asyncio.gather(*asked)
    assert [answer.status_code for answer in answers] == [200] * 40
    assert [content(answer) for answer in answers] == [content(answer) for answer in alike]
    rows = [rows for joined, rows in chat.steps if already < joined < already + 40]  # some wait
    print(f"rows in a step: {max(rows)} at the most, {sum(rows) / len(rows):.1f} on average")
    assert max(rows) >= 12
    assert sum(rows) / len(rows) >= 12


async def have_come(gateway: Tight, rows: int) -> None:
    """Wait until so many have joined, or wait to."""
    async with asyncio.timeout(60):
        while True:
            work = (await reading(gateway.client)).work
            if work["rows"] + work["tickets"] >= rows:
                return
            await asyncio.sleep(0.02)


def content(answer: httpx2.Response) -> Any:
    return answer.json()["choices"][0]["message"]["content"]
