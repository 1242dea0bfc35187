"""Loaded models.

cache      models by name: loaded once, leased, evicted
entry      one model in the cache and its state; failed loads
memory     places and bytes for models: which hold them, which wait
eviction   decides which models are admitted, leave or yield
"""
