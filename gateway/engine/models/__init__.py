"""A folder or a GGUF file → a model that runs. From the top down:

decoders         mlx-lm's model of a folder or a GGUF file
adapters         LoRA adapters of one model, many in one pass
adapter_files    a LoRA adapter's folder, read and checked
fused            q, k and v as one product, and gate and up
gguf             a chat model in one file, as llama.cpp keeps them
decoder_kernels  what replaces mlx-lm's SwiGLU and attention on a CPU
exponential      2 to the x in vectors, for CPUs
missing_kernels  what a device cannot multiply, tried at load and replaced
sharding         one model over several processes: this one's part of it
context          the tokens that a chat model may be given, without mlx
checkpoint       a model's folder, read and sized
"""
