"""Scheduling: queues, batches, locks, deadlines and memory. No mlx import, no HTTP.

faults           classifies the device's errors; restarts background tasks after errors
lane             the one global MLX lock, held in fair turns, and the one thread that runs MLX; how
                 many tokens a pass may have to stay within a time limit
watch            detects when the MLX thread stalls or dies
admission        bounds on waiting requests; deadlines; counts requests that are about to be queued
rate_limit       requests and tokens per minute of each caller
budget           the bytes of memory that models and their sequences share
tokenize         thread pools for work that would block the event loop; tokenizes texts in them
sandbox          processes for work that may hang, crash or use too much memory
response_store   responses stored for `previous_response_id`
ports            the Protocols of engines
ranks            one model split over several processes, whose engines make the same calls

Three rooms, which do not import one another, build on these modules:

models        the model cache: models are loaded once, kept while used, and evicted for others
embedding     waiting inputs → one padded pass → each caller's vectors
generation    continuous batching: sequences join, step and leave, within a memory budget
"""
