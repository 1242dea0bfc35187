"""Loaded models, downloads, and the catalog of served models.

cache      models by id: loaded once, leased, evicted
entry      one model in the cache, with its state; failed loads
pulls      downloads, one at a time, which callers can wait for together
served     the current catalog; facts about models' inputs, read from their files
named      models that callers name although models.yaml does not list them
eviction   places and bytes for models: which hold them, which wait, which are evicted
"""
