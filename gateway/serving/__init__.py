"""Time: queues, batches, locks, deadlines and memory. No mlx import, no HTTP.

faults           the meaning of the device's errors; background tasks restarted after errors
lane             the one global MLX lock, in fair turns, and the one thread that runs MLX; the
                 tokens that a pass may have to keep to a time limit
watch            notices when that thread stalls or dies
admission        bounds on waiting requests; deadlines; requests on their way
rate_limit       requests and tokens per minute of each caller
budget           the bytes of memory that models and their sequences share
tokenize         thread pools off the loop, and texts that are tokenized there
sandbox          processes for work that may hang, grow or crash
response_store   responses kept for `previous_response_id`
ports            the Protocols of engines
ranks            one model over several processes, whose engines make the same calls

Three rooms, which do not import one another, build on these:

models        leases: models are loaded once, kept while used, evicted for others
embedding     waiting inputs → one padded pass → each caller's vectors
generation    continuous batching: sequences join, step and leave, within memory
"""
