"""Load a model from its folder or GGUF file.

decoders         load mlx-lm's models; evaluate long passes in parts
adapters         LoRA adapters of one model
gemma4_assistant  the drafter of Gemma 4
hidden_states    the states from which tokens are guessed
gguf             chat models in llama.cpp's GGUF files
decoder_kernels  SwiGLU and attention for CPUs; fused projections
encoder_kernels  exp, softmax and GELU for CPUs
rotations        tables of rotary positions for CPUs
missing_kernels  replace layers that the device has no kernel for
sharding         one model divided among several processes
notes            the parts of a config that a model ignores; how its answers were verified
corrections      corrections of faults in mlx-lm's classes
ropes            corrections of rotary positions
configs          config.json translated to the keys that mlx-lm's classes read
mtp_head         the heads with which models guess tokens
head_names       which arrays in the files are such a head's
own_classes      model families that mlx-lm has no class for
unread           keys and arrays that mlx-lm's classes ignore
family_defaults  transformers' default values for a config
context          the most tokens that a model takes
counts           bounds for the sizes in a config
kv_costs         the bytes of KV that a sequence needs
checkpoint       a model's weights, and the memory that they need
torch_pickle     tensors that torch saved, read without unpickling
folder           a model's JSON files, and the headers of its weights
"""
