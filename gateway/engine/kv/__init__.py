"""What a model keeps of the tokens that it has read.

cache          the KV of sequences of different lengths, side by side
layers         a model's caches, a layer each, and rows that go back to before tokens not chosen
quantized      the same in 8 or 4 bits
prefix_cache   KV that later prompts may begin with
prefix_pieces  some of it as bytes, for a file
"""
