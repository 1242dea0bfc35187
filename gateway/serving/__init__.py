"""Time: who has the lane, who may wait for it, and until when. No mlx, no HTTP.

lane, watch, shares, workers       one lock and one thread for MLX, in turns; whether it still lives
admission, rates, arrivals         who may come in; who is on the way
budget, tokens, ports              bytes to share out; a pool that tokenises; what an engine is

Three rooms, strangers to one another, stand on these:

models        leases: loaded once, kept while used, let go of for others
embedding     waiting inputs → one padded pass → each caller's vectors
generation    rows join, step, leave: continuous batching, within memory
"""
