"""Loaded models.

cache      the models by name: loaded once, leased, let go of
entry      one model in the cache, and why it could not be loaded
memory     room for the next: which models go, and who waits for that
eviction   which of the idle ones, decided with numbers
"""
