"""Structured answers of one model take turns, over HTTP on real MLX."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gateway.engine.generation.engine import GenerationEngine
from gateway.jobs.steps import StepPlan, StepResult
from gateway.serving.generation.policy import QUANTUM
from gateway.serving.generation.scheduler import STEPS_PER_TURN
from tests.checkpoints import write_chat
from tests.cpu_engines import cpu_engines
from tests.fakes import Gate
from tests.serving_app import catalog, level, served
from tests.waiting import until

pytestmark = pytest.mark.anyio


def body(text: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    messages = [{"role": "user", "content": text}]
    return {"model": "chat", "messages": messages, "response_format": form, **more}


async def test_an_integer_beside_an_endless_string_waits_for_a_quantum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one structured answer runs at a time; the long one goes on as it would alone."""
    write_chat(tmp_path / "chat", max_position_embeddings=32_768)
    engines, gate, step = cpu_engines(), Gate(), GenerationEngine.step
    written: Counter[int] = Counter()  # tokens, by the ids of sequences
    ends: dict[int, int] = {}  # tokens that all had written when one ended
    is_paused = False

    def gated_step(engine: GenerationEngine, plan: StepPlan) -> StepResult:
        nonlocal is_paused
        gate.pass_through()
        result = step(engine, plan)
        for delta in result.deltas:
            written[delta.id] += delta.tokens
            if delta.finish_reason is not None:
                ends[delta.id] = written.total()
        if written.total() >= 210 and not is_paused:
            gate.close()
            is_paused = True
        return result

    monkeypatch.setattr(GenerationEngine, "step", gated_step)
    models = {"chat": {"kind": "chat", "source": "path:chat"}}
    endless = body("Go on.", {"type": "string", "minLength": 1500}, temperature=1, seed=1)
    integer = body("How many?", {"type": "integer", "maximum": 99}, temperature=1, seed=2)
    async with served(catalog(tmp_path, models), engines, structured_rows=1) as client:

        async def answer(asked: dict[str, Any]) -> str:
            done = (await client.post("/v1/chat/completions", json=asked)).json()
            return str(done["choices"][0]["message"]["content"])

        alone = await answer(endless | {"max_tokens": 200})
        assert written.total() == 200
        long = asyncio.create_task(answer(endless | {"max_tokens": 200}))
        await until(lambda: is_paused)
        short = asyncio.create_task(answer(integer))
        await until(lambda: level("gateway_tickets") == 1)
        before = written.total()
        gate.open()
        assert 0 <= int(await short) <= 99
        assert await long == alone
    first, second, third = sorted(written)
    assert list(ends) == [first, third, second], "the short one ended before the long one"
    meanwhile = ends[third] - before - written[third]
    assert meanwhile <= QUANTUM + 4 * STEPS_PER_TURN, "of the 200 that the long one writes"
