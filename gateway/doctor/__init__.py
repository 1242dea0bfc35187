"""The checks of `mlx-gateway doctor`: can this machine serve, and is the engine correct on it?

machine  checks of ports, folders, memory and packages, each a finding with advice
trial    loads each model as the gateway does, tests it and times it; imports mlx
report   the findings as a table, and as JSON without paths of this machine
"""
