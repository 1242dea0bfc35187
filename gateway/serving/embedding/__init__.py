"""Inputs → vectors, pairs → scores, in batches across requests.

batcher      texts with their prompts → vectors, also cached ones, and their cosine as a score
reranker     pairs of a query and a document → scores
row_batcher  the queue of either, and the passes that compute them
policy       which rows the next pass takes, how long it waits for more
"""
