"""Continuous batching of one chat model.

choice          one choice of a job, and the reader of a job's deltas
queue           bounds the queued jobs, and orders waiting sequences
memory          reserves the bytes for the KV of a model's sequences
policy          decides which sequences join, take turns, grow and are preempted
draft_gains     measures whether speculative decoding is faster on this device
widths          chooses how many sequences decode together, from measured times of decode steps
scheduler       plans each turn and each prefill pass
batcher         the model's two workers, for prefill and for decode
fan_out         runs the jobs of one request, several at a time
grammars        a cache of compiled grammars
answer_checks   validates finished answers against their JSON schemas
"""
