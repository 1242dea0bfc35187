"""python -m benchmarks.cpu_decoders: decoders on a CPU, with mlx-lm's functions and ours in turn.

Prints, for each batch, how many times as fast a prefill and a decode step are, and whether the
greedy tokens are the same. Takes some minutes.
"""

import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from gateway.engine.device import choose_device, configure, prepare_malloc

import mlx.core as mx  # isort: skip  (after OpenBLAS, which the line above loads)
from mlx_lm.models.activations import swiglu
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from benchmarks.checkpoints import write_chat
from gateway.engine.models.decoder_kernels import use_cpu_kernels

TURNS = 6
STEPS = 15
BATCHES = ((1, 64), (4, 100), (8, 64), (32, 64), (1, 1000))  # rows, and tokens of each prompt


def main() -> None:
    """Compare on the model in the folder given, or else on the chat model of `make bench`."""
    configure(choose_device("cpu"))
    prepare_malloc()
    with TemporaryDirectory() as folder:
        path = Path(sys.argv[1]) if sys.argv[1:] else write_chat(Path(folder) / "chat")
        model, _ = load_model(path)
        model.set_dtype(mx.float32)
        for rows, tokens in BATCHES:
            print(compared(model, rows, tokens), flush=True)


def compared(model: Any, rows: int, tokens: int) -> str:
    """Run both in turn; the first turn, in which shapes are made, does not count."""
    prefills, steps, is_same = [], [], True
    for turn in range(TURNS + 1):
        use_mlx_lms(model)
        own_prefill, own_step, own_tokens = run(model, rows, tokens)
        use_cpu_kernels(model)
        prefill, step, chosen = run(model, rows, tokens)
        is_same = is_same and chosen == own_tokens
        if turn:
            prefills.append(own_prefill / prefill)
            steps.append(own_step / step)
    return (
        f"{rows} x {tokens} tokens: prefill {median(prefills):.2f} "
        f"({min(prefills):.2f}-{max(prefills):.2f}), step {median(steps):.2f} "
        f"({min(steps):.2f}-{max(steps):.2f}), tokens {'the same' if is_same else 'differ'}"
    )


def run(model: Any, rows: int, tokens: int) -> tuple[float, float, list[Any]]:
    """Return the seconds of a prefill and of a step, and the tokens chosen."""
    prompts = mx.random.randint(5, 400, (rows, tokens), key=mx.random.key(0))
    cache, chosen = make_prompt_cache(model), []
    mx.eval(prompts)
    started = time.perf_counter()
    last = mx.argmax(model(prompts, cache=cache)[:, -1], axis=-1)
    mx.eval(last)
    read = time.perf_counter()
    for _ in range(STEPS):
        last = mx.argmax(model(last[:, None], cache=cache)[:, -1], axis=-1)
        mx.async_eval(last)  # type: ignore[no-untyped-call]  # its stub has no types
        chosen.append(last)
    mx.eval(last)
    ended = time.perf_counter()
    return read - started, (ended - read) / STEPS, [each.tolist() for each in chosen]


def use_mlx_lms(model: Any) -> None:
    """Give a model's modules mlx-lm's own functions back."""
    own = {"swiglu": swiglu, "scaled_dot_product_attention": scaled_dot_product_attention}
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        for name, function in own.items():
            if hasattr(module, name):
                setattr(module, name, function)


if __name__ == "__main__":
    main()
