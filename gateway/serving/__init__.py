"""Scheduling: queues, batches, locks, deadlines and memory. No mlx import, no HTTP.

faults           classifies the device's errors; restarts background tasks after errors
lane             the one global MLX lock, held in fair turns, and the one thread that runs MLX; the
                 number of tokens that a pass may have within a time limit
watch            detects when that thread stalls or dies
admission        bounds on waiting requests; deadlines; requests that are about to be queued
rate_limit       requests and tokens per minute of each caller
budget           the bytes of memory that models and their sequences share
tokenize         thread pools beside the event loop; tokenizes texts there
sandbox          processes for work that may hang, crash or use too much memory
response_store   responses stored for `previous_response_id`
ports            the Protocols of engines
ranks            one model split over several processes, whose engines make the same calls

Three rooms, which do not import one another, build on these:

models        leases: models are loaded once, kept while used, evicted for others
embedding     waiting inputs → one padded pass → each caller's vectors
generation    continuous batching: sequences join, step and leave, within a memory budget
"""
