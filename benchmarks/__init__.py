"""The project's own measurements; the package needs none of them.

targets            ratios to the engine alone and to mlx-lm's server: `make bench`
device             parity and speed of whatever device mlx has: `make device`
architectures      each of mlx-lm's architectures, batched, beside mlx-lm alone
simulation         scale on paper, from measured stage costs: `python -m benchmarks.simulation`
structured_output  how a file of JSON Schemas fares
conversations      the tenth turn of a conversation, warm and cold
adapters           LoRA adapters of one base beside merged models
kv_bits            KV in 8 and 4 bits beside KV as it is
startup            the start of two checkouts, by turns
cpu_decoders       mlx-lm's decoders on a CPU, with the kernels here and without
sampling           one sampler for all rows beside mlx-lm's of each row
loading            engines loaded in one go
servers            servers for the length of a block, each a process of its own
checkpoints        models with random weights, as much work as trained ones
tiny_models        configurations of every architecture, as small as they can be
batch_generator    mlx-lm's own generator, in-process or in a process of its own
llama_cpp          llama.cpp, as node brings it
seeing             a model with random weights that sees, and pictures for it
raw_client         streams over plain sockets, which take next to nothing to read
echo               the least that Starlette and Hypercorn can do
"""
