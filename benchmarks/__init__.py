"""What the project measures of itself; the package needs none of it.

targets            ratios to the engine alone and to mlx-lm's server: `make bench`
architectures      each of mlx-lm's architectures, batched, beside mlx-lm alone
simulation         scale on paper, from measured stage costs: `make simulate`
structured_output  how a file of JSON Schemas fares
adapters           LoRA adapters of one base beside merged models
sampling           one sampler for all rows beside mlx-lm's of each row
servers            servers for the length of a block, each a process of its own
checkpoints        models with random weights, as much work as trained ones
tiny_models        configurations of every architecture, as small as they can be
batch_generator    mlx-lm's own generator in-process
echo               the least that Starlette and Hypercorn can do
"""
