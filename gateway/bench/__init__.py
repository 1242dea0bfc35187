"""The load that `mlx-gateway bench` puts on a server, and the figures it computes.

    requests  builds the requests of each kind of work; reads and counts their answers
    load      runs N clients, each of which sends a request once its last is answered; uses HTTP
    figures   computes rates and percentiles from answers; no I/O

benchmarks/ uses these modules too.
"""
