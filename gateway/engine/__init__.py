"""The computations: the only package that imports mlx, mlx_lm, outlines and tokenizers.

All code is synchronous, without logging, metrics or locks. Code that uses MLX must run on the lane
(serving/lane). From the top down:

generation       prompts → tokens, in batches
prompting        messages → the tokens of a prompt
answers          tokens → text, reasoning and calls; without mlx
drafts           drafts for speculative decoding
kv               the KV cache
vision           images → features that replace the embeddings of tokens
embedding        texts → vectors; rerankers
grammar          grammars → the token mask of each step
models           a folder or a GGUF file → a loaded model
sandbox_worker   the program of the sandbox processes
control_tokens   encoding of callers' texts without control tokens
tokenizer_parts  checks of a tokenizer.json's costly parts
discovery        search for models on this machine
hub_offer        the size and kind of a model on the hub
hub              a model's files, on this machine or downloaded
inputs           a model's maximum input length and modalities
device_faults    the meaning of MLX's errors for the device
compiled_code    the folder for code that mlx compiles
device           the device, its limits and its memory
blas             the BLAS library that mlx uses
import_scan      a quicker import of transformers
"""

from gateway.engine import blas as blas
from gateway.engine import import_scan as import_scan
