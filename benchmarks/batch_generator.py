"""mlx-lm's own batch generator: the chat reference of the targets.

    python -m benchmarks.batch_generator FOLDER [--tuned]

reads lines {"prompts": [...], "tokens": N}, which may have a "temperature", and answers each with
{"rate": R}, on the BLAS that mlx comes with or, with --tuned, on the gateway's.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class BatchReference:
    """A model and its tokenizer, as mlx-lm loads them, on the thread that opens it.

    Products are computed by whatever BLAS was loaded before mlx.
    """

    def __init__(self, folder: Path) -> None:
        import mlx_lm

        loaded: Any = mlx_lm.load(str(folder))
        self._model, self._tokenizer = loaded[:2]

    @classmethod
    def tuned(cls, folder: Path) -> "BatchReference":
        """Load it behind the gateway's BLAS, threads and allocator."""
        from gateway.engine.device import Device, choose_device, configure, prepare_malloc

        device = choose_device("auto")
        if device is Device.CPU:
            prepare_malloc()
        configure(device)
        return cls(folder)

    def rate(self, prompts: Sequence[str], max_tokens: int, temperature: float = 0) -> float:
        """Answer every prompt in one batch; give tokens a second, from the texts on."""
        from mlx_lm.generate import BatchGenerator
        from mlx_lm.sample_utils import make_sampler

        started = time.perf_counter()
        encoded = [
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True
            )
            for prompt in prompts
        ]
        ends = [[token] for token in self._tokenizer.eos_token_ids]
        generator: Any = BatchGenerator(
            self._model, stop_tokens=ends, sampler=make_sampler(temperature)
        )
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


def main() -> None:
    """Answer each line of the standard input."""
    load = BatchReference.tuned if "--tuned" in sys.argv[2:] else BatchReference
    reference = load(Path(sys.argv[1]))
    for line in sys.stdin:
        asked = json.loads(line)
        rate = reference.rate(asked["prompts"], asked["tokens"], asked.get("temperature", 0))
        print(json.dumps({"rate": rate}), flush=True)


if __name__ == "__main__":
    main()
