"""What a GGUF file's metadata says of conversations: the tokenizer, where answers end, sampling."""

from collections.abc import Mapping
from typing import Any, Final

from mlx_lm.tokenizer_utils import TokenizerWrapper, _infer_tool_parser

from gateway.engine.gguf.checkpoint import GgufCheckpoint
from gateway.engine.gguf.tokenizer import read_end_ids, read_tokenizer

# Its keys, by the words of generation_config.json.
_SAMPLING: Final = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def wrapped_tokenizer(checkpoint: GgufCheckpoint) -> TokenizerWrapper:
    """Return the file's tokenizer, with its template and every end, as mlx-lm wraps a folder's.

    Raises ModelLoadFailed.
    """
    metadata, rows = checkpoint.header.metadata, checkpoint.config()["vocab_size"]
    with checkpoint.blamed():
        tokenizer = read_tokenizer(metadata)
        if len(tokenizer) > rows:  # MLX reads beyond an array's end without a word
            raise ValueError(f"it has {len(tokenizer):,} tokens and {rows:,} embeddings")
        if (declared := _infer_tool_parser(tokenizer)) is not None:  # type: ignore[no-untyped-call]
            tokenizer.init_kwargs["tool_parser_type"] = declared
        return TokenizerWrapper(tokenizer, eos_token_ids=read_end_ids(metadata))


def stated_sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return how its makers would have the model sampled, in the words of generation_config.json.

    https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
    """
    return {name: metadata[key] for name, key in _SAMPLING.items() if key in metadata}
