"""Structured answers of one model take turns, over HTTP on real MLX."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.engine.generation.engine import GenerationEngine
from gateway.jobs.steps import StepPlan, StepResult
from gateway.serving.generation.batcher import STEPS_PER_TURN
from gateway.serving.generation.policy import QUANTUM
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
    """Though only one structured answer runs at a time; the long one goes on as it would alone."""
    write_chat(tmp_path / "chat", max_position_embeddings=32_768)
    engines, gate, step = cpu_engines(), Gate(), GenerationEngine.step

    def gated_step(engine: GenerationEngine, plan: StepPlan) -> StepResult:
        gate.pass_through()
        return step(engine, plan)

    monkeypatch.setattr(GenerationEngine, "step", gated_step)
    models = {"chat": {"kind": "chat", "source": "path:chat"}}
    endless = body("Go on.", {"type": "string", "minLength": 1500}, temperature=1, seed=1)
    integer = body("How many?", {"type": "integer", "maximum": 99}, temperature=1, seed=2)
    async with served(catalog(tmp_path, models), engines, structured_rows=1) as client:
        post = client.post
        alone = (await post("/v1/chat/completions", json=endless | {"max_tokens": 200})).json()
        asked = endless | {"max_tokens": 200, "stream": True, "logprobs": True}
        texts: list[str] = []
        written = 0

        async def read() -> None:
            nonlocal written
            async with client.stream("POST", "/v1/chat/completions", json=asked) as answer:
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    (choice,) = json.loads(line[6:])["choices"]
                    texts.append(choice["delta"].get("content") or "")
                    written += len((choice["logprobs"] or {}).get("content") or ())

        reading = asyncio.create_task(read())
        await until(lambda: written >= 10)
        gate.close()
        asking = asyncio.create_task(post("/v1/chat/completions", json=integer))
        await until(lambda: level("gateway_tickets") == 1)
        before, ended = written, level("gateway_finished_total")
        gate.open()
        await until(lambda: level("gateway_finished_total") > ended)
        meanwhile = written - before
        assert not reading.done()
        answer = await asking
        assert 0 <= int(answer.json()["choices"][0]["message"]["content"]) <= 99
        assert meanwhile <= QUANTUM + 4 * STEPS_PER_TURN, "of the 200 that the long one writes"
        await reading
        assert "".join(texts) == alone["choices"][0]["message"]["content"]
