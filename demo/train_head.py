"""Train an MTP head for demo-chat: `python -m demo.train_head --out DIR --minutes 15`.

The head guesses the token after the next one. Writes demo-chat with the head as a layer after the
last, as DeepSeek V3 stores it; the other weights stay the same.
"""

import json
import shutil
import time
from pathlib import Path
from typing import Any, cast

from gateway import engine  # noqa: F401  (OpenBLAS before mlx)

# isort: split
import mlx.core as mx
from mlx import optimizers as optim
from mlx.nn.layers.base import Module
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_flatten

from demo.batches import Batch, Batches
from demo.forward import cross_entropy, head_states, hidden_states
from demo.options import read_options
from demo.train import MATRIX_RATE, OTHER_RATE, new_model, new_optimizer, rate, saved_tokenizer
from gateway.engine.models.mtp_head import MtpHead

CHAT = Path(__file__).parent / "chat"
BATCH_TOKENS = 2048
GUESSES = 2  # tokens after the next one that are learned, each from the guess before it
LOG_EVERY = 25
STORED = {
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "fc": "eh_proj",
    "norm": "shared_head.norm",
}


def loss_of(
    head: Any,
    model: Module,
    tokens: mx.array,
    positions: mx.array,
    places: mx.array,
    targets: mx.array,
) -> mx.array:
    """Mean cross-entropy of the guesses of `targets`, from the states before them."""
    states = mx.stop_gradient(hidden_states(model, tokens, positions))
    loss = mx.array(0.0)
    for _ in range(GUESSES):
        states = head_states(model, head, states, tokens, positions)
        loss = loss + cross_entropy(model, head.norm(states), places, targets)
    return loss / GUESSES


def step(
    head: Any, model: Module, optimizer: optim.MultiOptimizer, batch: Batch, factor: float
) -> float:
    """Learn from one batch; returns its loss before learning."""
    optimizer.optimizers[0].learning_rate = mx.array(MATRIX_RATE * factor)
    optimizer.optimizers[1].learning_rate = mx.array(OTHER_RATE * factor)
    arrays = map(mx.array, (batch.tokens, batch.positions, batch.places, batch.targets))
    loss, gradients = value_and_grad(head, loss_of)(head, model, *arrays)
    optimizer.update(head, gradients)
    mx.eval(loss, head.parameters(), optimizer.state)
    return cast(float, loss.item())


def stored_names(head: Any, settings: dict[str, Any]) -> dict[str, str]:
    """Return what a head's weights are called in the file, by their names in the head."""
    later, names = f"model.layers.{settings['num_hidden_layers']}", dict[str, str]()
    own: Any = tree_flatten(head.parameters(), destination={})
    for name in own:
        module, _, part = name.rpartition(".")
        stored = STORED.get(module, module.removeprefix("layers.0."))
        names[name] = f"{later}.{stored}.{part}"
    return names


def save(head: Any, settings: dict[str, Any], out: Path) -> None:
    """Write demo-chat and the head to a folder."""
    shutil.copytree(CHAT, out, dirs_exist_ok=True)
    weights = dict(cast(dict[str, mx.array], mx.load(str(CHAT / "model.safetensors"))))
    own: Any = tree_flatten(head.parameters(), destination={})
    for name, stored in stored_names(head, settings).items():
        weights[stored] = own[name].astype(mx.float16)
    mx.eval(weights)
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})
    config = json.dumps({**settings, "num_nextn_predict_layers": 1}, indent=2)
    (out / "config.json").write_text(config + "\n", "utf-8")


def load(head: Any, settings: dict[str, Any], folder: Path) -> None:
    """Set a head's weights to those that `save` wrote."""
    weights = cast(dict[str, mx.array], mx.load(str(folder / "model.safetensors")))
    stored = stored_names(head, settings)
    head.load_weights([(name, weights[stored[name]].astype(mx.float32)) for name in stored])


def train(out: Path, minutes: float, seed: int, start: Path | None = None) -> None:
    """Train a head for so many minutes of wall-clock time, and write it to `out`.

    `start` is a folder written earlier to go on from.
    """
    mx.random.seed(seed)
    settings = json.loads((CHAT / "config.json").read_text("utf-8"))
    model: Any = new_model(settings)
    model.load_weights(str(CHAT / "model.safetensors"))
    model.set_dtype(mx.float32)
    head, optimizer = MtpHead(model), new_optimizer()
    if start is not None:
        load(head, settings, start)
    begun, losses = time.monotonic(), 0.0
    for number, batch in enumerate(Batches(saved_tokenizer(CHAT), BATCH_TOKENS, seed + 1)):
        share = (time.monotonic() - begun) / (60 * minutes)
        if share >= 1:
            break
        losses += step(head, model, optimizer, batch, rate(number, share))
        if number % LOG_EVERY == LOG_EVERY - 1:
            print(f"{number + 1} {share:.0%} loss {losses / LOG_EVERY:.4f}", flush=True)
            losses = 0.0
    save(head, settings, out)


def main() -> None:
    """Read the command line and train."""
    train(**read_options(__doc__, minutes=15))


if __name__ == "__main__":
    main()
