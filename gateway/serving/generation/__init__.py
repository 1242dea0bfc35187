"""Continuous batching of one chat model.

choice          one choice of a job: waiting, in the batch or ended; reads a job's deltas
queue           bounds the queued jobs; orders waiting sequences, so that requests take turns
memory          the bytes of KV that a model's sequences may take
policy          pure functions: which sequences join, take turns, grow and are preempted
draft_gains     measures whether speculative decoding pays on this device
widths          how many sequences decode together, from the times of steps of several widths
scheduler       applies the policy: plans each turn, and the tokens of each prefill pass
batcher         two workers, one for prefill and one for decode; a batcher for each adapter
fan_out         runs the jobs of one request, several at a time
grammars        a cache of compiled grammars
answer_checks   validates finished answers against their JSON schemas; chooses answers to retry
"""
