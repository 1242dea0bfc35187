"""The load tool: what a server does for N clients, and how that compares with its engine alone.

    kinds      the kinds of work, and the defaults of each; imports nothing heavy
    workloads  a kind → its seeded requests, each with the judge of its answer
    judging    what a right answer is; anything else has a name
    events     bytes → server-sent events → the answer they add up to
    load       N clients, round after round, each asking again once answered; all of the HTTP
    figures    answers → rates and percentiles; pure
    engine     the same work in this process, on the engine itself; imports mlx
    report     figures → a table's rows, or JSON

The load never runs in the server's process.
"""
