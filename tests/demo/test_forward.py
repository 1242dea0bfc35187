"""The forward pass of training is mlx-lm's, only quicker."""

from pathlib import Path

from gateway import engine  # noqa: F401  (OpenBLAS before mlx)

# isort: split
import mlx.core as mx
import numpy as np

from demo.evaluate import CHAT, load_chat
from demo.forward import hidden_states


def test_training_and_mlx_lm_compute_the_same() -> None:
    model, tokenizer = load_chat(Path(CHAT))
    tokens = mx.array([tokenizer.encode("What is the capital of France? Wonome, 12.")])
    positions = mx.arange(tokens.shape[1])[None]
    expected = np.array(model.model(tokens))
    for start in (0, 9000):
        found = np.array(hidden_states(model, tokens, positions + start))
        np.testing.assert_allclose(found, expected, atol=2e-2 if start else 2e-4)
