"""Train demo-chat from nothing: `python -m demo.train --out DIR --minutes 75`.

Writes a folder mlx-lm loads. Progress goes to stdout; every few minutes the folder is replaced by
the newest weights, so that a run can be stopped at any time.
"""

import json
import shutil
import time
from dataclasses import fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

from gateway import engine  # noqa: F401  (OpenBLAS before mlx)

# isort: split
import mlx.core as mx
from mlx import optimizers as optim
from mlx.nn.layers.base import Module
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from tokenizers import Tokenizer

from demo.batches import Batch, Batches
from demo.data import conversations
from demo.forward import loss_at
from demo.options import read_options
from demo.tokens import BEGIN, CONTEXT, END, PAD, Template, save_tokenizer, train_tokenizer

VOCABULARY = 1024
BATCH_TOKENS = 4096
MATRIX_RATE = 0.02
OTHER_RATE = 0.003
WARM_UP_STEPS = 100
DECAY_SHARE = 0.3
SAVE_EVERY_S = 240
LOG_EVERY = 50
# So small a model would fill a string for ever.
GENERATION = {
    "do_sample": False,
    "structured": {"max_string_chars": 80, "max_array_items": 8},
}


def config(vocabulary: dict[str, int]) -> dict[str, Any]:
    """The config.json of the model."""
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 128,
        "num_hidden_layers": 5,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "vocab_size": len(vocabulary),
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "torch_dtype": "float16",
        "bos_token_id": vocabulary[BEGIN],
        "eos_token_id": vocabulary[END],
        "pad_token_id": vocabulary[PAD],
    }


def rate(step: int, share: float) -> float:
    """The learning rate's factor after `step` steps and a share of the time: up, flat, down."""
    warm = min(1.0, (step + 1) / WARM_UP_STEPS)
    left = min(1.0, max(0.0, 1.0 - share) / DECAY_SHARE)
    return warm * max(left, 0.01)


def new_model(settings: dict[str, Any]) -> Module:
    """A model with fresh weights; small embeddings, since they are the output layer too."""
    names = {field.name for field in fields(qwen3.ModelArgs)}
    known = {name: value for name, value in settings.items() if name in names}
    model = qwen3.Model(qwen3.ModelArgs(**known))
    shape = model.model.embed_tokens.weight.shape
    model.model.embed_tokens.weight = mx.random.normal(shape) * 0.05
    return model


def _weights(model: Any) -> dict[str, mx.array]:
    """Every weight by its name."""
    return cast(dict[str, mx.array], tree_flatten(model.parameters(), destination={}))


def _is_matrix(path: str, weight: mx.array) -> bool:
    return weight.ndim == 2 and "embed" not in path


def new_optimizer() -> optim.MultiOptimizer:
    """Muon for the layers' matrices, AdamW for embeddings and norms."""
    matrices = optim.Muon(MATRIX_RATE, weight_decay=0.0)
    others = optim.AdamW(OTHER_RATE, betas=[0.9, 0.99], weight_decay=0.0)
    return optim.MultiOptimizer([matrices, others], [_is_matrix])


def step(model: Module, optimizer: optim.MultiOptimizer, batch: Batch, factor: float) -> float:
    """Learn from one batch; returns its loss before learning."""
    optimizer.optimizers[0].learning_rate = mx.array(MATRIX_RATE * factor)
    optimizer.optimizers[1].learning_rate = mx.array(OTHER_RATE * factor)
    arrays = map(mx.array, (batch.tokens, batch.positions, batch.places, batch.targets))
    loss, gradients = value_and_grad(model, loss_at)(model, *arrays)
    clip: Any = optim.clip_grad_norm
    gradients, _ = clip(gradients, 1.0)
    optimizer.update(model, gradients)
    mx.eval(loss, _weights(model), optimizer.state)
    return cast(float, loss.item())


def save(model: Module, settings: dict[str, Any], tokenizer: Tokenizer, out: Path) -> None:
    """Replace the files in `out`; a reader sees each old or new, never half of one."""
    fresh = out.with_name(out.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_tokenizer(tokenizer, fresh)
    ends = {key: settings[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in {
        "config.json": settings,
        "generation_config.json": {**ends, **GENERATION},
    }.items():
        (fresh / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    weights = {path: w.astype(mx.float16) for path, w in _weights(model).items()}
    mx.save_safetensors(str(fresh / "model.safetensors"), weights, {"format": "mlx"})
    out.mkdir(parents=True, exist_ok=True)
    for file in fresh.iterdir():
        file.replace(out / file.name)
    fresh.rmdir()


def new_tokenizer(seed: int) -> Tokenizer:
    """A tokenizer learned from conversations."""
    template = Template()
    sample = [template.render(c.messages, c.tools) for c in islice(conversations(seed), 20000)]
    return train_tokenizer(sample, VOCABULARY)


def saved_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model trained before."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def train(out: Path, minutes: float, seed: int, start: Path | None = None) -> None:
    """Train for so many minutes of wall-clock time, writing to `out` as it goes.

    `start` is a folder written earlier to go on from; without it everything is new.
    """
    mx.random.seed(seed)
    tokenizer = saved_tokenizer(start) if start else new_tokenizer(seed)
    settings = config(tokenizer.get_vocab())
    model, optimizer = new_model(settings), new_optimizer()
    if start:
        model.load_weights(str(start / "model.safetensors"))
        model.set_dtype(mx.float32)
    print(f"{sum(w.size for w in _weights(model).values())} parameters", flush=True)
    keep = partial(save, model, settings, tokenizer, out)
    begun = saved = time.monotonic()
    losses, seen = 0.0, 0
    for number, batch in enumerate(Batches(tokenizer, BATCH_TOKENS, seed + 1)):
        now = time.monotonic()
        share = (now - begun) / (60 * minutes)
        if share >= 1:
            break
        losses += step(model, optimizer, batch, rate(number, share))
        seen += batch.tokens.size
        if number % LOG_EVERY == LOG_EVERY - 1:
            speed = seen / (now - begun)
            print(
                f"{number + 1} {(now - begun) / 60:.1f} min loss {losses / LOG_EVERY:.4f} "
                f"{speed:.0f} tokens/s",
                flush=True,
            )
            losses = 0.0
        if now - saved > SAVE_EVERY_S:
            keep()
            saved = now
    keep()


def main() -> None:
    """Read the command line and train."""
    train(**read_options(__doc__, minutes=75))


if __name__ == "__main__":
    main()
