"""Chooses and connects the concrete parts. Only this room imports every layer.

gateway         builds the application, and yields the gauges of /metrics
loading         loads and warms up a model with its batcher, and frees both in reverse order
engines         loads engines with MLX, which share the device, the hub and the sandboxes
chat_engines    loads engines that need mlx-lm, such as those of chat models
ranks           runs this process as one of several ranks that share a model
self_tests      tests a chat model at load and in idle time, and stores the verdict on disk
prefix_files    saves prefix caches in files that outlive a restart
limits          the limits of a model's batches, and of the memory of all models
named           reads the catalog: models in models.yaml, in settings or on disk
daemon_threads  runs calls that may never return, such as to a hub or a network disk
"""
