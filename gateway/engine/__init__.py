"""The computations: the only package that imports mlx, mlx_lm, outlines and tokenizers.

All code is synchronous, without logging, metrics or locks. Code that uses MLX must run on the lane
(serving/lane). From the top down:

generation       prompts → tokens, in batches
prompting        messages → the tokens of a prompt
answers          tokens → text, reasoning and calls; without mlx
drafts           drafts for speculative decoding
kv               the KV cache
vision           images → features that replace the embeddings of tokens
embedding        texts → vectors; rerankers
grammar          grammars → the token mask of each step
models           a folder or a GGUF file → a loaded model
sandbox_worker   the program of the sandbox processes
control_tokens   encoding of callers' texts without control tokens
tokenizer_parts  checks of a tokenizer.json's costly parts
discovery        search for models on this machine
hub_offer        the size and kind of a model on the hub
hub              a model's files, on this machine or downloaded
inputs           a model's maximum input length and modalities
device_faults    the meaning of MLX's errors for the device
compiled_code    the folder for code that mlx compiles
device           the device, its limits and its memory
blas             the BLAS library that mlx uses
"""

import sys
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Final

from gateway.engine import blas as blas

_MODULE: Final = "transformers.utils.import_utils"
_SCAN: Final = "create_import_structure_from_path"


class _ScanOnce:
    """Makes the import of transformers quicker.

    It reads the sources of its models, some 1,700 files, to learn which name is in which module:
    once for itself and once more for `transformers.models` (5.x, `define_import_structure`). Here
    the second reading gets what the first one found: 1.5 in place of 2 seconds of processor time
    until mlx-lm is imported (Intel Xeon, Python 3.11).
    """

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _MODULE else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_keep(module: ModuleType) -> None:
            execute(module)
            if hasattr(module, _SCAN):
                setattr(module, _SCAN, cache(getattr(module, _SCAN)))

        spec.loader.exec_module = execute_and_keep  # type: ignore[method-assign]
        return spec


if _MODULE not in sys.modules:
    sys.meta_path.insert(0, _ScanOnce)
