"""The forward pass of training is mlx-lm's, only quicker."""

from pathlib import Path

from gateway import engine  # noqa: F401  (OpenBLAS before mlx)

# isort: split
import mlx.core as mx
import numpy as np

from demo.evaluate import CHAT, load_chat
from demo.forward import hidden_states, quick_exp
from demo.train import DECAY_SHARE, WARM_UP_STEPS, rate


def test_training_and_mlx_lm_compute_the_same() -> None:
    """Hidden states agree to rounding, wherever the positions begin."""
    model, tokenizer = load_chat(Path(CHAT))
    tokens = mx.array([tokenizer.encode("What is the capital of France? Wonome, 12.")])
    positions = mx.arange(tokens.shape[1])[None]
    expected = np.array(model.model(tokens))
    for start in (0, 9000):
        found = np.array(hidden_states(model, tokens, positions + start))
        np.testing.assert_allclose(found, expected, atol=2e-2 if start else 2e-4)


def test_quick_exp_is_exp() -> None:
    """Over the range that softmax and SiLU need, the polynomial is right to 3e-6."""
    x = np.linspace(-80, 80, 10001, dtype=np.float32)
    np.testing.assert_allclose(np.array(quick_exp(mx.array(x))), np.exp(x), rtol=1e-5)


def test_the_learning_rate_warms_up_stays_and_falls() -> None:
    """Up by steps, flat, then down by the clock; never quite nothing."""
    late = 10 * WARM_UP_STEPS
    assert rate(0, 0.0) < 0.02
    assert rate(late, 0.0) == rate(late, 1 - DECAY_SHARE - 0.01) == 1.0
    assert 0 < rate(late, 0.999) < rate(late, 1 - DECAY_SHARE / 2) < 1
