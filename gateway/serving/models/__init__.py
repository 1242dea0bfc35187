"""Loaded models.

cache      models by name: loaded once, leased, evicted
entry      one model in the cache and its state; failed loads
eviction   places and bytes for models: which hold them, wait for them, leave for others
"""
