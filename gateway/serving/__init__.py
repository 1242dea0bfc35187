"""Scheduling: queues, batches, locks, deadlines and memory. No mlx import, no HTTP.

faults           classifies the device's errors; restarts background tasks after errors
lane             the global MLX lock and the one thread that runs MLX; bounds the tokens of a pass
watch            detects when the MLX thread stalls or dies
admission        bounds on waiting requests; deadlines; requests that are about to be queued
rate_limit       requests and tokens per minute of each caller
budget           the bytes of memory that models and their sequences share
tokenize         thread pools for work that would block the event loop; tokenizes texts
sandbox          processes for work that may hang, crash or use too much memory
response_store   responses stored for `previous_response_id`
ports            the Protocols of engines
ranks            one model split over several processes

Three rooms build on these modules, and do not import one another:

models        the model cache: models are loaded once, kept while used, and evicted for others
embedding     waiting inputs → one padded pass → each caller's vectors
generation    continuous batching: sequences join, step and leave, within a memory budget
"""
