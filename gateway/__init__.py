"""mlx-gateway: the OpenAI-compatible gateway for MLX models.

To remember: api speaks HTTP, serving keeps time, engine does maths.

The house, from the roof down; an import goes down, never up, never to a stranger on its floor:

    cli, __main__      one file per command; serve is the one that stays
    doctor             the engine tried on the user's own device
    bench              the load tool
    app                where concrete parts meet: an engine and a batcher for every spec
    api                HTTP and OpenAI semantics, one file per endpoint
    serving            time: the lane (one lock, one thread for MLX) and its watch, leases within
                       a memory budget, queues; no mlx
    wire | engine      OpenAI's shapes | tensors, token ids and model files: strangers
    registry           models.yaml → specs, as the environment has them
    settings           environment → settings
    jobs, errors       what crosses floors; what can go wrong, each with its status
    metrics, logs      instruments; event lines

An embeddings request: middleware gives it an id; api/embeddings reads an EmbedJob; the cache
leases the model, for which idle ones may have to go; the batcher tokenises and queues a ticket;
when it gains the lane it takes inputs of every ticket in turn until the batch is full, and the
engine does one forward pass; each ticket gets its rows, and the way back is the way in.

A chat request: the same, until the batcher's ticket is a row, and there is memory for its KV.
Reading prompts and decoding take turns of the lane of their own: rows join and a chunk is read, or
rows leave and each of the others gets a token; the deltas travel up one async generator, whose end,
however it comes, takes its row out of the batch.
"""

__version__ = "0.1.0"
