"""The maths: the only floor that imports mlx, mlx_lm, outlines and tokenizers.

Plain synchronous code: no await, no log line, no metric, no lock. Whatever touches MLX is called
under the one global MLX lock, which is serving/lane. From the top down:

generation      prompts → tokens, in batches; a grammar can be a row's own
prompting       messages → the tokens of a prompt
answers         tokens → text, reasoning and calls; without mlx
drafts          tokens read ahead: prompt lookup's guesses, or a smaller model's
kv              the keys and values of tokens that were read
vision          an image file → the numbers that a model's tower reads
embedding       texts → vectors, one pass for many
grammar         JSON Schemas and other forms → the mask of each step
models          a folder or a GGUF file → a model that runs
sandbox_worker  the work of a process of its own: templates, first tries of grammars, image files
control_tokens  callers' texts encoded without any
tokenizer_parts  bounds of the parts of a tokenizer.json
discovery       models on this machine, in others' folders too; the kind of each
hub_offer       the hub's files under a name, before any of its weights are fetched
hub             the source of a model's folder
inputs          the lengths of a model's inputs, by its files, before it is loaded
device_faults   MLX's errors, as facts about the device
compiled_code   the code that mlx compiles with g++: its folder, and whether there is room
device          the device and its dtype, its limits of memory and seconds; its speed
blas            the BLAS that mlx multiplies with, loaded before mlx is imported
"""

from gateway.engine import blas as blas
