"""Inputs → vectors, pairs → scores, in batches across requests.

batcher      texts with their prompts → vectors, also cached ones, and their cosine as a score
reranker     pairs of a query and a document → scores
row_batcher  the queue of both, and the passes that compute their rows
policy       which rows the next pass takes, and how long it waits for more
"""
