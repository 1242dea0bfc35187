"""mlx-gateway: the OpenAI-compatible gateway for MLX models.

To remember: api speaks HTTP, serving keeps time, engine does maths.

The house, from the roof down; an import goes down, never up, never to a stranger on its floor:

    cli, __main__      one file per command; serve is the one that stays
    server             beside cli: changes to Hypercorn's HTTP/1.1
    doctor             the user's own machine checked; the engine tested and timed on it
    bench              the load tool (its client is in the extra of that name)
    app                where concrete parts meet: an engine and a batcher for every spec
    api                HTTP, one file an endpoint; endpoints.py has the table of all of them
    serving            time: lane (the one global MLX lock, and the one thread that runs MLX),
                       models (leases within a memory budget), embedding and generation
                       (batchers); no mlx import
    wire | engine      the APIs' shapes | tensors, token ids and model files, in rooms called
                       models, kv, prompting, answers, grammar, embedding and generation: strangers
    registry           models.yaml → specs, as the environment has them
    settings           environment → settings
    jobs, errors       objects that cross floors; every error, with its status
    panics             panics of native code, as errors
    ids                ids of kept objects, which name the process that keeps them
    metrics, logs      instruments; event lines
    clock              the seconds that everything is timed by, and a request's by stage

An embeddings request: api/middleware gives it an id and a clock; api/embeddings reads its body by
wire/embeddings into an EmbedJob; serving/models/cache leases the model, for which idle ones may
have to go; serving/embedding/batcher tokenizes it and row_batcher queues it; when that gains
serving/lane, it takes inputs of every waiting request in turn until the batch is full
(embedding/policy), and engine/embedding/engine runs its passes; each request gets its rows, and
the way back is the way in. A rerank request takes the same way, by serving/embedding/reranker and
engine/embedding/cross_encoder or label_scorer; an embedding model scores by the cosine of its
vectors.

A chat request: the same by api/chat and wire/chat; engine/generation/prepare makes its sequences,
and serving/generation/scheduler lets them join, when there is memory for their KV. Reading prompts
and decoding take turns of the lane of their own. In each the scheduler makes a StepPlan, by
generation/policy, which engine/generation/engine carries out on its sequences: some join and a
chunk is read (prefill), or some leave and each of the others gets a token (decode_batch). The
deltas in its StepResult travel up one async generator to api/exchange, whose end, however it comes,
takes the sequence out of the batch.
"""

__version__ = "0.1.0"
