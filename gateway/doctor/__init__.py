"""The checks of `mlx-gateway doctor`.

machine  checks ports, folders, memory and packages
trial    loads, tests and times each model as the gateway would; imports mlx
report   the findings as a table, and as JSON without paths of this machine
"""
