"""A folder or a GGUF file → a model that runs. From the top down:

decoders         mlx-lm's model of a folder or a GGUF file; passes cut in parts
adapters         LoRA adapters of one model, their folders read and checked; many in one pass
gguf             a chat model in one file, as llama.cpp keeps them
decoder_kernels  SwiGLU and attention on a CPU, instead of mlx-lm's; projections fused
encoder_kernels  exp, softmax and GELU in vectors, for CPUs
rotations        rotary positions on a CPU, made once for all layers of a pass
missing_kernels  products that a device has no kernel for, tried at load and replaced
sharding         one model over several processes: this one's part of it
notes            the parts of a config that a model ignores, and the reference for its answers
corrections      faults of mlx-lm's classes, corrected in a model that was built
ropes            its rotary positions, as config.json has them
configs          config.json in the words of mlx-lm's classes
own_classes      families and forms of files that mlx-lm has no class for
unread           the keys that a class of mlx-lm reads, by its source; keys and arrays that nothing
                 reads, and the refusal of those that change answers
family_defaults  transformers' values for keys that a config.json lacks
context          the tokens that a model may be given, without mlx
counts           numbers of a model's files, each within its bounds
checkpoint       a model's folder, read and sized
"""
