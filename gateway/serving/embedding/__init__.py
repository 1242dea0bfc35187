"""Inputs → vectors, in batches across requests.

batcher    requests wait, one pass takes inputs of all of them, each has its own vectors
policy     which inputs the next pass takes, and how long a burst is waited for; cached vectors
"""
