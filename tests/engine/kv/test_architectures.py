"""Architectures that keep more, or other things, than plain KV."""

import io
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from benchmarks.steps import Steps
from gateway.engine.generation.engine import GenerationEngine
from gateway.jobs.chat import Sampling
from gateway.jobs.steps import SequenceParams
from tests.checkpoints import ABSOLUTE, SLIDING, STATEFUL, write_chat
from tests.engine.generation.harness import join, open_engine


def unevaluated(engine: GenerationEngine) -> int:
    """Count the edges of the graphs behind the running rows' caches."""
    assert engine._sequences._running is not None
    leaves: Any = tree_flatten([layer.state for layer in engine._sequences._running.cache])
    arrays = [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]
    assert arrays
    drawn = io.StringIO()
    export: Any = mx.export_to_dot  # a file-like object will do; the stubs know none
    export(drawn, *arrays)
    return drawn.getvalue().count("->")


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sliding": SLIDING,
    # Only the first state's lengths make the mask: those of the others reach no logits.
    "stateful": {**STATEFUL, "num_hidden_layers": 4, "full_attn_idxs": [0]},
    "absolute": ABSOLUTE,
}


@pytest.mark.parametrize("lengths", [(33,), (20, 33)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_graph_grows_with_tokens(tmp_path: Path, kind: str, lengths: tuple[int, ...]) -> None:
    """A batch that never empties would end with Metal out of buffers."""
    config = KINDS[kind]
    engine = open_engine(write_chat(tmp_path / "m", **config, eos_token_id=[9_999_999]))
    steps = Steps(engine)
    for length in lengths:
        prompt = range(5, 5 + length)
        greedy = Sampling(temperature=0)
        join(steps, SequenceParams(prompt=prompt, max_tokens=300, sampling=greedy, is_bare=True))
    while steps.is_reading:
        steps.prefill(512)
    counts = []
    for _ in range(3):
        for _ in range(10):
            steps.decode()
        engine.synchronize()
        counts.append(unevaluated(engine))
    assert counts[0] == counts[1] == counts[2]
