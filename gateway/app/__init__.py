"""Where concrete parts meet: the only room that knows every floor.

gateway   settings and a catalog → a running application
opening   a spec → a loaded model with its batcher; freed in reverse order
engines   specs → engines loaded with MLX; the one import of the engine floor
hub       settings → where models come from; apart: calls that may never return
limits    settings and a spec → what bounds a model's batches, and all models' memory
warming   the first pass, at load; gauges: what /metrics reads when it is asked
"""
