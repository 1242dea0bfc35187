"""Continuous batching of one chat model.

batcher     the two loops: prompts are read, rows decode
queue       who has a place, and who waits for one
scheduler   who waits, runs, is held, gives way
policy      limits, ranks, and who joins next: decisions alone
sequence    one answer on its way to its caller
steps       a turn's work on the lane's thread
memory      what rows may take of the budget
grammars    compiled once, shared
verdicts    finished answers judged by what no grammar holds
"""
