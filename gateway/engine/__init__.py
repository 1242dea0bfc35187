"""The maths: the only floor that imports mlx, mlx_lm, outlines and tokenizers.

Plain synchronous code: no await, no log line, no metric, no lock. Whatever touches MLX is called
under the one global MLX lock, which is serving/lane. From the top down:

generation      prompts → tokens, in batches; a grammar can be a row's own
prompting       messages → the tokens of a prompt
answers         tokens → text, reasoning and calls; without mlx
drafts          tokens read ahead: prompt lookup's guesses, or a smaller model's
kv              what is kept of the tokens that were read
embedding       texts → vectors, one pass for many
grammar         JSON Schemas and other forms → the mask of each step
models          a folder or a GGUF file → a model that runs
sandbox_worker  what a process of its own runs: templates, first tries of grammars
control_tokens  callers' texts encoded without any
tokenizer_parts  what parts of a tokenizer.json may cost
discovery       models that lie on this machine, in others' folders too; what each is for
hub_offer       what the hub has under a name, before any of its weights are fetched
hub             where a model's folder comes from
inputs          how long a model's inputs may be, by its files, before it is loaded
device_faults   what MLX's errors say of the device
compiled_code   what mlx compiles with g++: where, and whether there is room for it
device          which device, its dtype, what it bears of memory and seconds; how fast it multiplies
blas            which BLAS mlx multiplies with, loaded before mlx is imported
"""

from gateway.engine import blas as blas
