"""What a model keeps of the tokens that it has read.

cache         the KV of sequences of different lengths, side by side
quantized     the same in 8 or 4 bits
prefix_cache  KV that later prompts may begin with
"""
