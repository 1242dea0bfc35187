"""What `mlx-gateway bench` asks a server, and what it counts.

    requests  the requests of each kind of work; their answers, read also as streams, and counted
    load      N clients, each asking again once answered; all of the HTTP
    figures   answers → rates and percentiles; pure

benchmarks/ measures with these too.
"""
