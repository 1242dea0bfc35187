"""The load that `mlx-gateway bench` puts on a server, and its figures.

requests  builds requests; reads and counts their answers
pictures  draws images to send
load      runs clients that send one request after another; uses HTTP
figures   computes rates and percentiles from answers; no I/O

benchmarks/ uses these modules, too.
"""
