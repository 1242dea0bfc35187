"""mlx-gateway: the OpenAI-compatible gateway for MLX models.

In one line: api speaks HTTP, serving schedules the work, engine computes.

The packages, from the top layer down. A package imports only from layers below its own; wire and
engine, which share a layer, do not import each other:

    cli, __main__      one file per command; `serve` is the only one that keeps running
    server             used by cli: changes to Hypercorn's HTTP/1.1
    doctor             checks the user's machine; tests and times the engine on it
    bench              the load tool, whose HTTP client the extra `bench` installs
    app                creates and connects the parts: an engine and a batcher for every spec
    api                HTTP, one file per endpoint; endpoints.py has the table of all of them
    serving            scheduling: lane (the one global MLX lock, and the one thread that runs MLX),
                       models (leases within a memory budget), embedding and generation
                       (batchers); no mlx import
    wire | engine      the JSON of the APIs | tensors, token ids and model files, in rooms called
                       models, kv, prompting, answers, grammar, embedding and generation
    registry           models.yaml → specs; environment variables may override keys
    settings           environment → settings
    jobs, errors       requests and results that layers exchange; every error, with its status
    panics             turns panics of native code into errors
    ids                ids of stored objects, which name the process that stores them
    metrics, logs      Prometheus metrics; structured log events
    clock              the monotonic clock, and the time that a request spends in each stage

An embeddings request: api/middleware gives it an id and timings. api/embeddings parses its body
with wire/embeddings into an EmbedJob. serving/models/cache leases the model, and may evict idle
models for it. serving/embedding/batcher tokenizes the inputs and row_batcher queues them. When
row_batcher gets the lane (serving/lane), it takes inputs from every waiting request in turn until
the batch is full (embedding/policy), and engine/embedding/engine runs the passes. Each request gets
its vectors, which return through the same modules. A rerank request takes the same way, through
serving/embedding/reranker and engine/embedding/cross_encoder or label_scorer; an embedding model
scores with the cosine of its vectors.

A chat request takes the same way through api/chat and wire/chat. engine/generation/prepare makes
its sequences, and serving/generation/scheduler lets them join the batch when there is memory for
their KV. Prefill and decode take separate turns of the lane. In each turn the scheduler makes a
StepPlan, using generation/policy, and engine/generation/engine carries it out: either sequences
join and a chunk of their prompts is read (prefill), or sequences leave and each remaining one gets
a token (decode_batch). The deltas in the StepResult travel up one async generator to api/exchange.
When that generator is closed, for any reason, the sequence leaves the batch.
"""

__version__ = "0.1.0"
