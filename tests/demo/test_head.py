"""The head that is trained for demo-chat is the one that the gateway reads."""

import json
from pathlib import Path
from typing import Any

from gateway import engine  # noqa: F401  (OpenBLAS before mlx)

# isort: split
import mlx.core as mx
import numpy as np

from demo.forward import head_states, hidden_states
from demo.train import new_model
from demo.train_head import CHAT, load, loss_of, save
from gateway.engine.device import Device
from gateway.engine.kv.layers import batch_of_one, make_batch_caches
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.decoders import open_decoder
from gateway.engine.models.mtp_head import MtpHead

SETTINGS = json.loads((CHAT / "config.json").read_text("utf-8"))
TOKENS = [5, 17, 300, 42, 42, 7, 911, 64, 3]


def trainee() -> tuple[Any, Any]:
    mx.random.seed(1)
    model: Any = new_model(SETTINGS)
    model.load_weights(str(CHAT / "model.safetensors"))
    model.set_dtype(mx.float32)
    return model, MtpHead(model)


def test_training_and_the_gateway_compute_the_same(tmp_path: Path) -> None:
    model, head = trainee()
    save(head, SETTINGS, tmp_path)
    load(head, SETTINGS, tmp_path)  # as rounded
    served, _ = open_decoder(
        Checkpoint("demo", tmp_path), device=Device.CPU, dtype="float32", has_head=True
    )
    tokens = mx.array([TOKENS])
    positions = mx.arange(len(TOKENS))[None]
    hidden = hidden_states(model, tokens, positions)
    expected = head_states(model, head, hidden, tokens, positions)
    cache = batch_of_one(make_batch_caches(served))
    served(tokens[:, :-1], cache=cache)
    found = served.guess(cache[-2][0], tokens[:, -1:], cache[-1])
    np.testing.assert_allclose(found[0, 0], expected[0, -1], atol=2e-3)
    logits = model.model.embed_tokens.as_linear(head.norm(expected))
    np.testing.assert_allclose(served.score(found)[0, 0], logits[0, -1], atol=2e-3)


def test_a_head_learns_from_nothing_but_the_states_before_each_token() -> None:
    model, head = trainee()
    positions, places = mx.arange(len(TOKENS))[None], mx.array([3])
    losses = []
    for last in (7, 8):  # changing a later token changes nothing
        tokens = mx.array([[*TOKENS[:4], last, *TOKENS[5:]]])
        losses.append(loss_of(head, model, tokens, positions, places, mx.array([9])).item())
    assert losses[0] == losses[1]
    earlier = mx.array([[*TOKENS[:3], 8, *TOKENS[4:]]])
    assert loss_of(head, model, earlier, positions, places, mx.array([9])).item() != losses[0]
