"""Loaded models, downloads, and the catalog of served models.

cache      models are loaded once, leased to requests, and evicted when idle
entry      one model in the cache, and failures of loads
pulls      downloads, one at a time
served     the current catalog, and facts about models' inputs
named      models that callers name although models.yaml does not list them
eviction   which models hold places and bytes, wait for them, or are evicted
"""
