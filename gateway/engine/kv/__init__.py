"""The KV cache of a model: the keys and values of the tokens that it has read.

cache          one layer's KV, for a batch of sequences of different lengths
layers         operations on the caches of all layers, such as the rollback of rejected tokens
quantized      KV in 8 or 4 bits
prefix_cache   KV of earlier prompts, for later prompts with the same prefix
prefix_pieces  pieces of the prefix cache, encoded for files
"""
