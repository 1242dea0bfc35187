"""The maths: the only floor that imports mlx, mlx_lm, outlines and tokenizers.

Plain synchronous code: no await, no log line, no metric, no lock. Whatever touches MLX is called
under the one global MLX lock, which is serving/lane. From the top down:

generation         prompts → tokens, in batches; a grammar can be a row's own
embedding          texts → vectors, one pass for many
grammar            JSON Schemas and other forms → the mask of each step
sandboxed          what a process of its own runs: templates, first tries of grammars
decoders           mlx-lm's model of a folder or a GGUF file
sharding           one model over several processes: this one's part of it
decoder_kernels    what replaces mlx-lm's SwiGLU and attention on a CPU
gguf               a chat model in one file, as llama.cpp keeps them
missing_kernels    what a device cannot multiply, tried at load and replaced
control_tokens     callers' texts encoded without any
fused_projections  q, k and v as one product, and gate and up
checkpoint, hub    a model's folder, read and sized; where it comes from
context            the tokens that a chat model may be given, without mlx
exponential        2 to the x in vectors, for CPUs
device_faults      what MLX's errors say of the device
bounds             what a device bears: buffers, the largest, seconds at a time
device             which device, its dtype and memory limits; how fast it multiplies
blas               which BLAS mlx multiplies with, loaded before mlx is imported
"""

from gateway.engine import blas as blas
