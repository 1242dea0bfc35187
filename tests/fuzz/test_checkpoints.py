"""Checkpoints with odd files: each loads or is refused by name, and no other model notices."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import given
from hypothesis import strategies as st

from gateway.serving.models import entry
from tests.checkpoints import write_chat
from tests.cpu_engines import cpu_engines
from tests.engine.embedding.harness import tiny
from tests.fuzz.checkpoints import SPOILS, Spoil, spoiled
from tests.fuzz.harness import bounded
from tests.generators import within_share
from tests.serving_app import catalog, served

SHORT, LONG = 60, 2000
LOAD_S = 10.0  # processor time for the load and its first answer
MORE_BYTES = 500 << 20
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi, x h a"}]}),
    "rerank": ("/v1/rerank", {"query": "Hi", "documents": ["a x h", "Hi"]}),
    "embedding": ("/v1/embeddings", {"input": ["Hi", "a x h"]}),
}
# The codes by which a model's own files are refused, or a request that they make impossible.
CODES: set[str | None] = {
    "model_load_failed",
    "engine_failed",
    "insufficient_memory",
    "context_length_exceeded",
}
CODES |= {None, "model_refused"}
NAMED = [
    *("vocabulary", "model_max_length", "max_seq_length", "architecture"),
    "config.json",
    "tokenizer",
    "chat template",
    "safetensors",
    "weights",
    "context",
    "memory",
    "prompt",
]


class Asker:
    """A gateway with a sound model and, of each kind, one whose folder is written anew."""

    def __init__(self, folder: Path, client: httpx2.AsyncClient) -> None:
        self.folder = folder
        self.client = client

    async def ask(self, model: str, kind: str, **more: Any) -> httpx2.Response:
        path, body = ASKED[kind]
        return await self.client.post(path, json={"model": model, **body, **more})

    async def held_bytes(self) -> float:
        metrics = (await self.client.get("/metrics")).text
        held = (line for line in metrics.splitlines() if line.startswith("gateway_budget_held"))
        return float(next(held).split()[1])

    async def try_out(self, kind: str, spoils: list[Spoil]) -> None:
        """Load a spoilt checkpoint and ask it, beside a stream of the sound one."""
        model = f"spoilt-{kind}"
        spoiled(self.folder / kind, self.folder / model, spoils)
        before, began = await self.held_bytes(), time.process_time()
        reset_peak()
        stream = asyncio.create_task(self.ask("sound", "chat", max_tokens=30, stream=True))
        more = {"max_tokens": 4} if kind == "chat" else {}
        answers = [await self.ask(model, kind, **more)]
        if answers[0].status_code == 200 and kind == "chat":
            answers.append(await self.ask(model, kind, logprobs=True, top_logprobs=3, **more))
        seconds = time.process_time() - began
        neighbour = await stream
        assert neighbour.status_code == 200
        assert "[DONE]" in neighbour.text
        assert '"error"' not in neighbour.text
        await self.client.post(f"/admin/models/{model}/unload")
        async with asyncio.timeout(60):
            while await self.held_bytes() != before:
                await asyncio.sleep(0.005)
        assert (await self.client.get("/ready")).status_code == 200
        for answer in answers:
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert error["code"] in CODES, error
                named = [f"`{model}` failed on this request", *NAMED]
                assert any(name in error["message"] for name in named), error
        assert seconds < LOAD_S
        assert peak_bytes() < MORE_BYTES


_rest = 0


def _status(key: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{key}:")[2].split()[0])


def reset_peak() -> None:
    """Forget the most memory that this process has held. Linux alone knows it."""
    global _rest
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")
        _rest = _status("VmRSS")


def peak_bytes() -> int:
    """Count the memory that this process has taken since then."""
    if not Path("/proc/self/clear_refs").exists():
        return 0
    return _status("VmHWM") - _rest


@contextmanager
def trying(folder: Path) -> Iterator[Callable[[str, list[Spoil]], None]]:
    """Serve, and give a function that tries a spoilt checkpoint out."""
    write_chat(folder / "chat", num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    tiny(folder, "bert").rename(folder / "embedding")
    tiny(folder, "bert-reranker").rename(folder / "rerank")
    models = {"sound": {"kind": "chat", "source": "path:chat", "preload": True}}
    for kind in ASKED:
        spoiled(folder / kind, folder / f"spoilt-{kind}", [])
        models[f"spoilt-{kind}"] = {"kind": kind, "source": f"path:spoilt-{kind}"}
    app = served(catalog(folder, models), cpu_engines(), admin_key="k")
    with (
        start_blocking_portal("asyncio") as portal,
        portal.wrap_async_context_manager(app) as client,
    ):
        client.headers["authorization"] = "Bearer k"
        client.timeout = httpx2.Timeout(120)
        asker = Asker(folder, client)
        yield lambda kind, spoils: portal.call(asker.try_out, kind, spoils)


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(SHORT, marks=pytest.mark.generator(weight=3)),
        pytest.param(LONG, marks=pytest.mark.soak),
    ],
)
def test_a_checkpoint_loads_or_is_refused_by_name(
    examples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so within bounds of processor time and memory, while a neighbour's stream goes on.

    The memory budget is the same afterwards.
    """
    monkeypatch.setattr(entry, "BROKEN_S", 0.0)  # a folder is written anew at once
    with trying(tmp_path) as try_out:

        @bounded(examples, is_repeated=examples == SHORT)
        @given(st.sampled_from(sorted(ASKED)), st.lists(SPOILS, min_size=1, max_size=3))
        @within_share
        def run(kind: str, spoils: list[Spoil]) -> None:
            try_out(kind, spoils)

        run()
