"""Chooses and connects the concrete parts: the only room that imports every floor.

gateway         settings and a catalog → a running application, with the gauges of /metrics
loading         a spec → a warmed model with its batcher; freed in reverse order
engines         specs → engines loaded with MLX, which share the device, the hub and sandboxes
chat_engines    chat models and label-scoring reranks → engines; imported late, as mlx-lm is slow
ranks           this process as one of several ranks that share a model
self_tests      a chat model's self-test at load and in idle time; its verdicts on disk
prefix_files    the KV kept of prompts, in files that outlive a restart
limits          settings and a spec → the bounds of a model's batches, and all models' memory
named           settings → the catalog: models.yaml, and models that were named or found; the hub
daemon_threads  calls that may never return, such as to a hub or a network disk
"""
