"""A folder or a GGUF file → a model that runs. From the top down:

decoders         mlx-lm's model of a folder or a GGUF file; projections fused, passes cut in parts
adapters         LoRA adapters of one model, their folders read and checked; many in one pass
gguf             a chat model in one file, as llama.cpp keeps them
decoder_kernels  what replaces mlx-lm's SwiGLU and attention on a CPU
encoder_kernels  exp, softmax and GELU in vectors, for CPUs
missing_kernels  what a device cannot multiply, tried at load and replaced
sharding         one model over several processes: this one's part of it
context          the tokens that a model may be given, without mlx
counts           numbers of a model's files, each within its bounds
checkpoint       a model's folder, read and sized
"""
