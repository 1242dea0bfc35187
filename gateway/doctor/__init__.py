"""The self-check behind `mlx-gateway doctor --engine`: does the engine compute rightly here.

child          the process that loads one model and tries it, since a crash of mlx ends one
process        what that process says, line by line, and how it ended
examination    the stages of a model: load, try, measure, close
embedding      what an embedding model is made to do
generation     what a chat model is made to do
findings       what was measured → ok, warn or fail; pure
machine        versions, system and device, for a bug report
report         a table, and JSON without paths
"""
