"""Where concrete parts meet: the only room that knows every floor.

gateway  settings and a catalog → a running application
engines  specs → engines loaded with MLX; the one import of the engine floor
"""
