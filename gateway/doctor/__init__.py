"""The self-check behind `mlx-gateway doctor`: can this machine serve, and is the engine right here?

machine  checks of the machine: ports, folders, memory, packages, each a finding with advice
trial   each model loaded as the gateway loads it, tested and timed; imports mlx
report  the findings, as a table, and as JSON without paths of this machine
"""
