"""What `mlx-gateway bench` asks a server, and what it counts.

    requests  a kind of work → its seeded requests, each with what counts its answer
    streams   bytes → server-sent events → the answer they add up to
    load      N clients, each asking again once answered; all of the HTTP
    figures   answers → rates and percentiles; pure

benchmarks/ measures with these too.
"""
