"""Continuous batching of one chat model.

batcher         two workers, one for prefill and one for decode: schedule, run, process
adapted         a batcher for the requests of one of its adapters
queue           bounds on a model's jobs, and jobs that wait for a place
scheduler       which sequences wait, run, are parked, leave and are preempted
policy          limits, ranks, and which sequences join next: decisions without side effects
sequence        one answer being written, and the scheduler's output
steps           a turn's work on the lane's thread
memory          the bytes of KV that a model's sequences may take
grammars        a cache of compiled grammars
answer_checks   answers checked by the parts of a schema that no grammar enforces
"""
