"""Inputs → vectors, pairs → scores, in batches across requests.

batcher      texts with the model's prompts → vectors, which are cached; scores from their cosines
reranker     pairs of a query and a document → scores
row_batcher  the base class of both: a queue of requests, and the passes that compute their rows
policy       which rows the next pass takes, and how long it waits for more
"""
