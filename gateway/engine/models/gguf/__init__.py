"""Chat models in llama.cpp's GGUF files, which are never trusted. From the bottom up:

header          metadata and the list of tensors, checked
quants          blocks of quantized weights → floats, or MLX's packed form
vocabulary      metadata → a tokenizer with its chat template
architectures   metadata and tensors → mlx-lm's config and weight names
checkpoint      the file as a `Listing`; building and reading the model
"""
