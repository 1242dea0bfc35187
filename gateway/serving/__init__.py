"""Time: who has the lane, who may wait for it, and until when. No mlx, no HTTP.

lane, watch, workers       one lock and one thread for MLX, in fair turns; whether it still lives
admission, rate_limit      who may come in; who is on the way
budget, tokenize, ports    bytes to share out; a pool that tokenises; what an engine is
pace, sandbox              how much fits in a pass; a process for what might end this one
response_store             answers kept for `previous_response_id`

Three rooms, strangers to one another, stand on these:

models        leases: loaded once, kept while used, let go of for others
embedding     waiting inputs → one padded pass → each caller's vectors
generation    rows join, step, leave: continuous batching, within memory
"""
