"""The self-check behind `mlx-gateway doctor --engine`: is the engine right here, and how fast?

trial   each model loaded as the gateway loads it, tested and timed; imports mlx
report  what was found, as a table, and as JSON without paths of this machine
"""
