"""Chooses and connects the concrete parts: the only room that imports every layer.

gateway         settings and a catalog → a running application, with the gauges of /metrics
loading         a spec → a warmed-up model with its batcher; freed in reverse order
engines         specs → engines loaded with MLX, which share the device, the hub and sandboxes
chat_engines    chat models and rerankers that score labels → engines; imported late, since mlx-lm
                takes long to import
ranks           runs this process as one of several ranks that share a model
self_tests      a chat model's self-test, at load and in idle time; stores its verdicts on disk
prefix_files    saves prefix caches in files that outlive a restart
limits          settings and a spec → the limits of a model's batches, and all models' memory
named           settings → the catalog: models.yaml, models named in settings or found on disk
daemon_threads  threads for calls that may never return, such as to a hub or a network disk
"""
