"""Computes vectors of texts, and scores of documents, in passes that requests share.

batcher      texts → vectors, which are cached; scores of documents from cosines
reranker     pairs of a query and a document → scores
row_batcher  the base class of the two batchers: a queue of requests, and passes over their rows
policy       which rows the next pass takes, and how long it waits for more
"""
