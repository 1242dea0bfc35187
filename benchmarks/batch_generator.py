"""mlx-lm's own batch generator in-process: the chat reference of the targets. Imports mlx."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway.engine.device import Device, choose_device, configure, prepare_malloc

import mlx_lm  # isort: skip  (after OpenBLAS, which the line above loads)
from mlx_lm.generate import BatchGenerator


class BatchReference:
    """A model and its tokenizer, as mlx-lm loads them, on the thread that opens it."""

    def __init__(self, folder: Path) -> None:
        device = choose_device("auto")
        if device is Device.CPU:
            prepare_malloc()
        configure(device)
        loaded: Any = mlx_lm.load(str(folder))
        self._model, self._tokenizer = loaded[:2]

    def rate(self, prompts: Sequence[str], max_tokens: int) -> float:
        """Answer every prompt in one batch; give tokens a second, from the texts on."""
        started = time.perf_counter()
        encoded = [
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True
            )
            for prompt in prompts
        ]
        ends = [[token] for token in self._tokenizer.eos_token_ids]
        generator: Any = BatchGenerator(self._model, stop_tokens=ends)
        try:
            left = set(generator.insert(encoded, [max_tokens] * len(encoded)))
            tokens = 0
            while left:
                said = generator.next_generated()
                tokens += len(said)
                left -= {each.uid for each in said if each.finish_reason is not None}
        finally:
            generator.close()
        return tokens / (time.perf_counter() - started)
