"""mlx-gateway: the OpenAI-compatible gateway for MLX models.

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

An embeddings request: api/embeddings parses the body into an EmbedJob, and serving/models/cache
leases the model. serving/embedding/row_batcher queues the inputs, and fills a batch from all
waiting requests when it gets the lane. engine/embedding/engine computes the vectors.

A chat request: api/chat parses the body into a GenerateJob. serving/generation/scheduler makes a
StepPlan for each turn of the lane, and engine/generation/engine carries it out. The deltas of the
StepResult return through an async generator to api/exchange. When this generator is closed, for
any reason, the sequence leaves the batch.

"""

__version__ = "0.1.0"
