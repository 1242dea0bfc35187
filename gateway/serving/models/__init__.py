"""Loaded models, downloads, and the catalog of served models.

cache      models are loaded once, leased to requests, and evicted when idle
entry      one model in the cache, with its state; failed loads
pulls      downloads, one at a time; all callers of a model wait for one download
served     the current catalog; facts about models' inputs, read from files
named      models that callers name although models.yaml does not list them
eviction   places and bytes: which models hold them, wait for them, are evicted
"""
