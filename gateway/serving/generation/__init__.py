"""Continuous batching of one chat model.

choice          one choice of a job: waiting, in the batch or ended
queue           bounds on a model's jobs, and jobs that wait for a place
waiting         rows that wait to join: requests take turns
memory          the bytes of KV that a model's rows may take
policy          which rows join, take turns, grow and are preempted: decisions of numbers alone
scheduler       carries them out: the plan of a turn
batcher         two workers, one for prefill and one for decode: schedule, run, process
adapted         a batcher for the requests of one of its adapters
many            the jobs of one request, several at a time
grammars        a cache of compiled grammars
answer_checks   answers checked by the parts of a schema that no grammar enforces
"""
