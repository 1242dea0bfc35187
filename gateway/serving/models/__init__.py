"""Loaded models.

cache      models by name: loaded once, leased, evicted
entry      one model in the cache and its state; failed loads
pulls      downloads, one at a time, each watched by all who wait for it
served     the catalog as it is now; how long models' inputs may be, by their files
named      models that callers name, beside those of models.yaml
eviction   places and bytes for models: which hold them, wait for them, leave for others
"""
