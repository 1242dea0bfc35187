"""Conversations that take turns with others go on from their kept prefixes, over HTTP."""

import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
import structlog

from tests.checkpoints import SLIDING, STATEFUL, write_chat
from tests.cpu_engines import cpu_engines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio

KINDS: dict[str, dict[str, Any]] = {"plain": {}, "sliding": SLIDING, "stateful": STATEFUL}
CHUNK = 128
OWN = {"batching": {"prefix_cache_bytes": 1 << 20}}
SEA = "tell me of the sea and of the old man and his boat " * 8
WISH = SEA + "who caught a silver fish that could speak " * 5
STORM = SEA + "when the wind rose and the gulls were afraid " * 5
CITY = "a clockmaker lived among brass gears and springs " * 10


class Asked:
    """A model's answers, and the prompts' tokens that were cached."""

    def __init__(self, client: httpx2.AsyncClient, model: str) -> None:
        self._client = client
        self._model = model
        self.cached: list[int] = []

    async def say(self, prompt: str) -> tuple[str, int, int]:
        """Return the answer, the number of the prompt's tokens and that of the cached ones."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 3}
        answer = (await self._client.post("/v1/completions", json=body)).json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.cached.append(cached)
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens"], cached

    async def counted(self) -> float:
        series = rf'gateway_cached_prompt_tokens_total{{model="{self._model}"}} (\S+)'
        found = re.search(series, (await self._client.get("/metrics")).text)
        return 0.0 if found is None else float(found[1])


@pytest.mark.parametrize(
    "kind",
    ["plain", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sliding", "stateful"))],
)
async def test_a_conversation_is_at_hand_after_others_that_begin_like_it_and_do_not(
    tmp_path: Path, kind: str
) -> None:
    """As many tokens are cached as if the conversation were alone, and the answers are those of a
    gateway that keeps nothing.
    """
    name = f"{kind}-reused"  # a series of its own
    write_chat(tmp_path / name, **KINDS[kind])
    entry = {"kind": "chat", "source": f"path:{name}", "sampling": {"temperature": 0}}
    told = {}
    turns = (WISH, CITY, STORM, WISH + "and then?", CITY + "and then?")
    for case, others, room in (("kept", turns, 1 << 26), ("alone", turns[::3], 1 << 26),
                               ("cold", turns[2:], 0)):  # fmt: skip
        engines = cpu_engines(prefix_cache_bytes=room)
        given = catalog(tmp_path, {name: entry})
        async with served(given, engines, prefill_chunk_tokens=CHUNK) as client:
            asked = Asked(client, name)
            before = await asked.counted()
            told[case] = {prompt: await asked.say(prompt) for prompt in others}
            assert await asked.counted() - before == sum(asked.cached)
    again = told["kept"][WISH + "and then?"]
    assert again == told["alone"][WISH + "and then?"]
    assert again[2] > told["kept"][STORM][2] > 0
    assert told["kept"][CITY][2] == 0
    assert told["kept"][CITY + "and then?"][2] > 0
    for prompt, (text, read, _) in told["cold"].items():
        assert told["kept"][prompt][:2] == (text, read)
        assert told["cold"][prompt][2] == 0


async def test_a_prompt_that_cannot_be_kept_is_counted_and_logged_once(tmp_path: Path) -> None:
    """The log tells of the first such prompt only, the counter of all of them."""
    name = "unkept"
    write_chat(tmp_path / name)
    models = catalog(tmp_path, {name: {"kind": "chat", "source": f"path:{name}"}})
    with structlog.testing.capture_logs() as logged:
        kept: Any = {"prefix_cache_bytes": 1 << 15}
        async with served(models, cpu_engines(**kept), **kept) as client:
            asked = Asked(client, name)
            for prompt in ("short", WISH, STORM):
                await asked.say(prompt)
            metrics = (await client.get("/metrics")).text
    (told,) = [line for line in logged if line["event"] == "prompt_not_kept"]
    found = re.search(rf'gateway_prefix_unkept_tokens_total{{model="{name}"}} (\S+)', metrics)
    assert found is not None
    assert float(found[1]) > told["tokens"] > 0


async def test_models_share_what_the_machine_has_room_for(tmp_path: Path) -> None:
    """They share by default, within the rest of the budget; one with a number has its own."""
    entries = {name: {"kind": "chat", "source": f"path:{name}"} for name in ("one", "two", "own")}
    for name in entries:
        write_chat(tmp_path / name)
    models = catalog(tmp_path, {**entries, "own": {**entries["own"], **OWN}})
    engines = cpu_engines(prefix_cache_bytes="auto")
    weights = (await engines.size(models.specs[0], tmp_path / "one")).weights
    budget = 3 * weights + (4 << 20)
    async with served(models, engines, cache_max_bytes=budget, kv_allowance_tokens=0) as client:
        asked = {name: Asked(client, name) for name in entries}
        for _ in range(2):
            for each in asked.values():
                await each.say(WISH)
        pool = engines._chat.prefixes
        assert {each.cached[0] for each in asked.values()} == {0}
        assert min(each.cached[1] for each in asked.values()) > 0
        assert len({kept.owner for kept in pool.entries.values()}) == 2
        assert 0 < pool.nbytes <= pool.limit <= budget - 3 * weights


async def test_what_decisions_cost_is_told_the_same_when_their_input_is_at_hand(
    tmp_path: Path,
) -> None:
    """Only the count of cached tokens is higher; the probabilities are the same."""
    name = "decided"
    write_chat(tmp_path / name)
    questions = [{"type": "predicate", "instructions": f"Is it {word}?"} for word in ("a", "b")]
    body = {"model": name, "input": WISH, "questions": questions}
    engines = cpu_engines(prefix_cache_bytes=1 << 26)
    models = catalog(tmp_path, {name: {"kind": "chat", "source": f"path:{name}"}})
    async with served(models, engines) as client:
        cold, warm = [(await client.post("/v1/decisions", json=body)).json() for _ in range(2)]
    cached = [each["usage"]["input_tokens_details"]["cached_tokens"] for each in (cold, warm)]
    assert 0 < cached[0] < cached[1]
    assert warm["usage"]["input_tokens"] == cold["usage"]["input_tokens"] > cached[1]
    for one, other in zip(cold["answers"], warm["answers"], strict=True):
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-5)
