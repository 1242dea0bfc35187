"""Loading a model's folder or GGUF file as a model that runs. From the top down:

decoders         load a folder or GGUF file as mlx-lm's model; evaluate long passes in parts
adapters         read and check LoRA adapters; apply several of them in one pass
gguf             chat models in llama.cpp's GGUF files
decoder_kernels  faster SwiGLU and attention for CPUs than mlx-lm's; fused projections
encoder_kernels  vectorized exp, softmax and GELU for CPUs
rotations        tables of rotary positions on a CPU, shared by all layers of a pass
missing_kernels  find the layers whose products the device has no kernel for, and replace them
sharding         one model divided among several processes
notes            the parts of a config that a model ignores, and the reference for its answers
corrections      corrections of faults in mlx-lm's classes, made in a built model
ropes            corrections of a built model's rotary positions
configs          config.json translated to the keys that mlx-lm's classes read
own_classes      model families and checkpoint layouts that mlx-lm has no class for
unread           keys and arrays that mlx-lm's class ignores: refused if they change answers
family_defaults  transformers' default values for keys that a config.json lacks
context          the most tokens that a model takes, computed without mlx
counts           bounds for the sizes that a config states
kv_costs         the KV that a sequence costs in a loaded model
checkpoint       a model's folder: its JSON files, its weights, and the memory that they need
"""
