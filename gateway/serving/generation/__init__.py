"""Continuous batching of one chat model.

choice          one choice of a job: waiting, in the batch or ended; a job's deltas as they come
queue           places for jobs; ranks, and sequences that wait to join: requests take turns
memory          the bytes of KV that a model's sequences may take
policy          which sequences join, take turns, grow and are preempted: pure functions
draft_gains     whether drafts make answers come sooner on this device
widths          how many sequences decode together, by measured steps of several widths
scheduler       carries them out: the plan of a turn; the number of tokens that a prefill pass reads
batcher         two workers, one for prefill and one for decode; a batcher for each adapter
fan_out         the jobs of one request, several at a time
grammars        a cache of compiled grammars
answer_checks   checks answers by the parts of a schema that no grammar enforces; chooses which to
                write again
"""
