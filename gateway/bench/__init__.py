"""The requests that `mlx-gateway bench` sends to a server, and its figures of the answers.

    requests  the requests of each kind of work; their answers, read also as streams, and counted
    load      N clients, each asking again once answered; all of the HTTP
    figures   answers → rates and percentiles; pure

benchmarks/ measures with these too.
"""
