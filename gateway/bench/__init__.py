"""The load that `mlx-gateway bench` puts on a server, and the figures it computes.

    requests  builds the requests of each kind of work; reads and counts their answers
    load      N clients, each sending its next request once answered; the only HTTP
    figures   answers → rates and percentiles; no I/O

benchmarks/ uses these modules too.
"""
