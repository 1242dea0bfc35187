"""The load tool: what a server does for N clients, and what of it the engine alone would do.

    kinds      what can be asked for, and the defaults of each
    texts      what the requests say: seeded, and no two alike
    workloads  a kind → its requests, each with the judge of its answer
    judging    what a right answer is; anything else has a name
    events     bytes → server-sent events → the answer they add up to
    load       N clients, each asking again once answered, and how far they are; the only part that
               asks
    rounds     one number of clients after another, the engine in between
    figures    answers → rates and percentiles; pure
    engine     the same work in-process, straight on the engine; imports mlx
    report     figures → a table's rows, or JSON

The load never runs in the server's process.
"""
