"""One embedding model's queue: inputs of many requests in one pass."""
