"""The bytes counted for rows before they join are never fewer than the bytes they hold then."""

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from benchmarks.steps import Steps
from gateway.engine.device import Device
from gateway.engine.models.checkpoint import Checkpoint, kv_bytes
from gateway.engine.models.kv_costs import measure_kv
from gateway.jobs.steps import SequenceParams
from gateway.serving.generation.memory import KV_STEP, Layout, RowCosts
from tests.checkpoints import SLIDING, STATEFUL, write_chat
from tests.engine.generation.harness import ARCHITECTURES, GREEDY, held, join, open_engine

pytestmark = pytest.mark.slow

KINDS: dict[str, dict[str, Any]] = {"plain": {}, "sliding": SLIDING, "stateful": STATEFUL}


def row(prompt: int, max_tokens: int) -> SequenceParams:
    return SequenceParams(
        prompt=[2 + i % 40 for i in range(prompt)],
        max_tokens=max_tokens,
        sampling=GREEDY,
        is_bare=True,
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", [*KINDS, "drafted"])
def test_rows_hold_no_more_kv_than_is_counted(tmp_path: Path, kind: str, seed: int) -> None:
    chance = random.Random(seed)
    is_drafted = kind == "drafted"
    draft = write_chat(tmp_path / "d", seed=1, num_hidden_layers=6) if is_drafted else None
    engine = open_engine(
        write_chat(tmp_path / "m", **KINDS.get(kind, {})), 1_000_000, 4, draft=draft
    )
    steps = Steps(engine)
    costs = RowCosts(engine.facts.kv_cost, chunk_tokens=256)
    used: dict[int, int] = {}
    whole: dict[int, int] = {}
    apart: set[int] = set()
    gone: set[int] = set()
    most = 0
    for _ in range(150):
        if chance.random() < 0.25 and len(used) < 6:
            asked = row(chance.choice([3, 20, 300, 700]), chance.choice([1, 2, 30, 200]))
            joined = join(steps, asked)
            used[joined], whole[joined] = len(asked.prompt), len(asked.prompt) + asked.max_tokens
        if used and chance.random() < 0.2:
            one = chance.choice(list(used))
            match act := chance.choice(["parking", "preempting", "resuming", "leaving"]):
                case "parking":
                    apart.add(one)
                case "preempting":
                    gone.add(one)
                case "resuming":
                    apart.discard(one)
                    gone.discard(one)
                case "leaving":
                    del used[one]
            steps.change(**{act: [one]})
        deltas = steps.prefill(256) if steps.is_reading else []
        for delta in (*deltas, *steps.decode()):
            assert delta.error is None
            used[delta.id] += delta.tokens
            if delta.finish_reason is not None:
                del used[delta.id]
        lone = {each for each in used if each in apart or whole[each] - used[each] <= 1} - gone
        layout = Layout(
            [used[each] for each in used.keys() - lone - gone],
            [used[each] for each in used.keys() & lone],
        )
        most = max(most, held(engine))
        assert held(engine) <= layout.nbytes(costs)
    assert most > 0


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_kv_is_counted_by_what_each_layer_keeps(tmp_path: Path, kind: str) -> None:
    folder = write_chat(tmp_path / "m", **ARCHITECTURES[kind])
    model, _ = load_model(folder)
    cost = measure_kv(model)
    for tokens in (20, 600):
        cache = make_prompt_cache(model)
        for start in range(0, tokens, 20):
            model(mx.array([[5 + start % 7] * 20]), cache=cache)
            mx.eval([layer.state for layer in cache])
        nbytes = [int(layer.nbytes) for layer in cache]
        assert sum(nbytes) <= cost.of(tokens + KV_STEP, 20)
        assert cost.of(tokens) <= sum(nbytes) + max(nbytes)
    config = kv_bytes(Checkpoint("m", folder), Device.CPU, None, 600)
    assert (cost.of(600) < config) == (kind != "llama")
