"""Train demo-vision from nothing: `python -m demo.seeing.train --out DIR --minutes 40`.

Writes a folder of Qwen3-VL's layout. Progress goes to stdout; every few minutes the folder is
replaced by the newest weights, so that a run can be stopped at any time.
"""

import json
import shutil
import time
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, cast

from gateway import engine  # noqa: F401  (OpenBLAS before mlx)

# isort: split
import mlx.core as mx
import numpy as np
from mlx import optimizers as optim
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from tokenizers import Tokenizer

from demo.options import read_options
from demo.seeing.batches import Batch, Batches
from demo.seeing.drawing import SIDE
from demo.seeing.forward import GRID, MERGE, Seeing, loss_at
from demo.seeing.questions import sample_texts
from demo.seeing.tokens import CLOSE, CONTEXT, IMAGE, OPEN, save_tokenizer, train_tokenizer
from demo.tokens import BEGIN, END, PAD
from gateway.engine.vision.families import FAMILIES
from gateway.engine.vision.patches import QwenPatches
from gateway.engine.vision.tower_numbers import read_numbers

MATRIX_RATE: Final = 0.01
OTHER_RATE: Final = 0.0008
SAVE_EVERY_S: Final = 60
LOG_EVERY: Final = 20
WARM_UP_STEPS: Final = 20
DECAY_SHARE: Final = 0.3
_FRAMES: Final = 2
PREPROCESSING: Final[dict[str, Any]] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": SIDE // GRID,
    "merge_size": MERGE,
    "temporal_patch_size": _FRAMES,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE},
}


def config(vocabulary: dict[str, int]) -> dict[str, Any]:
    """The config.json of the model."""
    text = {
        "model_type": "qwen3_vl_text",
        "hidden_size": 160,
        "num_hidden_layers": 4,
        "intermediate_size": 320,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 100.0,
        "rope_scaling": {
            "rope_type": "default",
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "max_position_embeddings": CONTEXT,
        "vocab_size": len(vocabulary),
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": vocabulary[BEGIN],
        "eos_token_id": vocabulary[END],
        "pad_token_id": vocabulary[PAD],
    }
    vision = {
        "model_type": "qwen3_vl",
        "depth": 2,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_heads": 4,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "patch_size": SIDE // GRID,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": _FRAMES,
        "num_position_embeddings": GRID * GRID,
        "out_hidden_size": text["hidden_size"],
        "deepstack_visual_indexes": [0],
    }
    return {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "image_token_id": vocabulary[IMAGE],
        "vision_start_token_id": vocabulary[OPEN],
        "vision_end_token_id": vocabulary[CLOSE],
        "text_config": text,
        "vision_config": vision,
    }


def patches_of() -> QwenPatches:
    """The settings in PREPROCESSING."""
    middle = (0.5, 0.5, 0.5)
    return QwenPatches(
        patch=SIDE // GRID,
        merge=MERGE,
        frames=_FRAMES,
        mean=middle,
        std=middle,
        scale=1 / 255,
        resample="bicubic",
        least_pixels=SIDE * SIDE,
        most_pixels=SIDE * SIDE,
    )


def axes_of(settings: dict[str, Any]) -> list[int]:
    """Return which position, of time, row and column, turns each pair of a head."""
    text = settings["text_config"]
    axes = [0] * (text["head_dim"] // 2)
    for axis, pairs in enumerate(text["rope_scaling"]["mrope_section"]):
        for number in range(pairs if axis else 0):
            axes[axis + 3 * number] = axis
    return axes


def new_model(settings: dict[str, Any]) -> Seeing:
    """A model with fresh weights; small embeddings, since they are the output layer too."""
    text = settings["text_config"]
    names = {field.name for field in fields(qwen3.ModelArgs)}
    args = qwen3.ModelArgs(
        **{name: each for name, each in text.items() if name in names - {"rope_scaling"}}
    )
    model = Seeing(read_numbers(settings, FAMILIES["qwen3_vl"]), args)
    embeddings = model.language_model.model.embed_tokens
    embeddings.weight = mx.random.normal(embeddings.weight.shape) * 0.05
    # Learned places stay zero: where something is, M-RoPE tells.
    model.visual.pos_embed.weight = mx.zeros_like(model.visual.pos_embed.weight)
    cast(Any, model.visual.pos_embed).freeze()
    return model


def rate(step: int, share: float) -> float:
    """The learning rate's factor after `step` steps and a share of the time: up, flat, down."""
    left = min(1.0, max(0.0, 1.0 - share) / DECAY_SHARE)
    return min(1.0, (step + 1) / WARM_UP_STEPS) * max(left, 0.01)


def _weights(model: Any) -> dict[str, mx.array]:
    """Every weight by its name."""
    return cast(dict[str, mx.array], tree_flatten(model.parameters(), destination={}))


def _is_matrix(path: str, weight: mx.array) -> bool:
    return weight.ndim == 2 and "embed" not in path and "merger" not in path


def new_optimizer() -> optim.MultiOptimizer:
    """Muon for the layers' matrices, AdamW for embeddings, norms and mergers."""
    matrices = optim.Muon(MATRIX_RATE, weight_decay=0.0)
    others = optim.AdamW(OTHER_RATE, betas=[0.9, 0.99], weight_decay=0.0)
    return optim.MultiOptimizer([matrices, others], [_is_matrix])


def step(model: Seeing, optimizer: optim.MultiOptimizer, batch: Batch, factor: float) -> float:
    """Learn from one batch; returns its loss before learning."""
    optimizer.optimizers[0].learning_rate = mx.array(MATRIX_RATE * factor)
    optimizer.optimizers[1].learning_rate = mx.array(OTHER_RATE * factor)
    arrays = [mx.array(getattr(batch, field.name)) for field in fields(batch)]
    loss, gradients = value_and_grad(model, loss_at)(model, *arrays)
    clip: Any = optim.clip_grad_norm
    gradients, _ = clip(gradients, 1.0)
    optimizer.update(model, gradients)
    mx.eval(loss, _weights(model), optimizer.state)
    return cast(float, loss.item())


def named_as_files(model: Seeing) -> dict[str, mx.array]:
    """Return the weights in float16 by the names of transformers' files."""
    named: dict[str, mx.array] = {}
    for name, weight in _weights(model).items():
        if name == "visual.patch_embed.proj.weight":
            side = SIDE // GRID
            weight = weight.reshape(len(weight), 3, _FRAMES, side, side)
        name = name.replace("language_model.model.", "language_model.")
        named[f"model.{name}"] = weight.astype(mx.float16)
    return named


def load_weights(model: Seeing, folder: Path) -> None:
    """Read the weights that `save` wrote, in float32."""
    read = cast(dict[str, mx.array], mx.load(str(folder / "model.safetensors")))
    named = []
    for name, weight in read.items():
        name = name.removeprefix("model.").replace("language_model.", "language_model.model.")
        flat = weight.reshape(len(weight), -1) if weight.ndim > 2 else weight
        named.append((name, flat.astype(mx.float32)))
    model.load_weights(named)


def save(model: Seeing, settings: dict[str, Any], tokenizer: Tokenizer, out: Path) -> None:
    """Replace the files in `out`; a reader sees each old or new, never half of one."""
    fresh = out.with_name(out.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_tokenizer(tokenizer, fresh)
    text = settings["text_config"]
    ends = {key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in {
        "config.json": settings,
        "generation_config.json": {**ends, "do_sample": False},
        "preprocessor_config.json": PREPROCESSING,
    }.items():
        (fresh / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    mx.save_safetensors(str(fresh / "model.safetensors"), named_as_files(model), {"format": "pt"})
    out.mkdir(parents=True, exist_ok=True)
    for file in fresh.iterdir():
        file.replace(out / file.name)
    fresh.rmdir()


def train(out: Path, minutes: float, seed: int, start: Path | None = None) -> None:
    """Train for so many minutes of wall-clock time, writing to `out` as it goes.

    `start` is a folder written earlier to go on from; without it everything is new.
    """
    mx.random.seed(seed)
    if start:
        tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(sample_texts())
    settings = config(tokenizer.get_vocab())
    model, optimizer = new_model(settings), new_optimizer()
    if start:
        load_weights(model, start)
    print(f"{sum(each.size for each in _weights(model).values())} parameters", flush=True)
    batches = Batches(
        tokenizer, patches_of(), model.language_model.args, axes_of(settings), seed + 1
    )
    begun = saved = time.monotonic()
    losses: dict[str, list[float]] = {}
    for number, (task, batch) in enumerate(batches):
        now = time.monotonic()
        share = (now - begun) / (60 * minutes)
        if share >= 1:
            break
        losses.setdefault(task, []).append(step(model, optimizer, batch, rate(number, share)))
        if number % LOG_EVERY == LOG_EVERY - 1:
            means = " ".join(f"{task} {np.mean(each):.4f}" for task, each in sorted(losses.items()))
            print(f"{number + 1} {(now - begun) / 60:.1f} min loss {means}", flush=True)
            losses = {}
        if now - saved > SAVE_EVERY_S:
            save(model, settings, tokenizer, out)
            saved = now
    save(model, settings, tokenizer, out)


def main() -> None:
    """Read the command line and train."""
    train(**read_options(__doc__, minutes=40))


if __name__ == "__main__":
    main()
