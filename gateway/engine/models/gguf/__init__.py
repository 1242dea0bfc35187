"""GGUF files: a chat model in one file, in llama.cpp's format.

Nothing in such a file is trusted, and none of it is run. From the bottom up:

    header          the file's own list of metadata and tensors, checked before anything else
    quants          blocks of weights → numbers, or MLX's own packing of them
    vocabulary      metadata → a tokenizer with its chat template, as mlx-lm wraps them
    architectures   metadata and tensors → mlx-lm's config and names, or a refusal by name
    checkpoint      the file as any model's files are seen: config, arrays, costs; its model
"""
