"""Inputs → vectors, in batches across requests.

batcher    the queue of inputs, and the passes that embed them
policy     which inputs the next pass takes, how long it waits for more; cached vectors
"""
