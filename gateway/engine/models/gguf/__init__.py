"""GGUF files: a chat model in one file, in llama.cpp's format.

Nothing in such a file is trusted or run. From the bottom up:

    header          the file's list of metadata and tensors, checked before anything else
    quants          blocks of quantized weights → floats, or MLX's packed form
    vocabulary      metadata → a tokenizer with its chat template, as mlx-lm wraps them
    architectures   metadata and tensors → mlx-lm's config and names, or an error naming the key
    checkpoint      the file as a `Listing` of config and arrays; building and reading the model
"""
