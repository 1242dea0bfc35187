"""The KV cache of a model: the keys and values of the tokens that it has read.

cache          the KV of sequences of different lengths, side by side
layers         a model's caches, one a layer, and rows that go back to before tokens not chosen
quantized      KV in 8 or 4 bits
prefix_cache   KV that later prompts may begin with
prefix_pieces  pieces of that KV as bytes, for a file
"""
