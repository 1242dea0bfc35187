"""The computations: the only package that imports mlx, mlx_lm, outlines and tokenizers.

All code is plain and synchronous, without await, logging, metrics or locks. Code that uses MLX must
run on the lane (serving/lane), which is the global lock of MLX. From the top down:

generation      prompts → tokens, in batches, each row with its own sampling and grammar
prompting       messages → the tokens of a prompt
answers         tokens → text, reasoning and calls; without mlx
drafts          speculative decoding: drafts from prompt lookup or from a smaller model
kv              the KV cache: keys and values of the tokens that a model has read
vision          an image → features that take the place of tokens; vision towers, positions
embedding       texts → vectors, many per pass
grammar         JSON Schemas and other grammars → the token mask of each step
models          a folder or a GGUF file → a loaded model
sandbox_worker  the program of the sandbox processes: templates, grammars, answers, image files
control_tokens  encoding of callers' texts without control tokens
tokenizer_parts  bounds on the cost of a tokenizer.json's parts
discovery       search for models on this machine; the kind of each model
hub_offer       the size and kind of a model on the hub, before its weights are downloaded
hub             a model's files: where they are on this machine; downloads from the hub
inputs          a model's maximum input length, read from its files before it is loaded
device_faults   the meaning of MLX's errors for the device
compiled_code   the code that mlx compiles with g++: its folder and the disk space for it
device          the choice of device and dtype; its limits of memory and time; its speed
blas            the BLAS library that mlx uses, loaded before mlx is imported
"""

from gateway.engine import blas as blas
