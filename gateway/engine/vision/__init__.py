"""Images in prompts: a file's pixels → features that replace the embeddings of tokens.

sight     the images of sequences, encoded once and read with their prompts
features  a cache of images' features
reading   a decoder of mlx-lm's that reads features
rotation  M-RoPE instead of a decoder's rope
layout    the positions of a prompt's tokens
kinds     the declaration of each family
towers    loading of a checkpoint's vision tower
qwen      the tower of Qwen3-VL and Qwen3.5 to 3.8
qwen_windows  the tower of Qwen2.5-VL
pixtral   the tower of Pixtral, Mistral 3 and Ministral 3
parts     a tower's work in parts
prompts   a job's images → spans of its prompt
patches   pixels → patches, and the sizes of images
pictures  an image file → its size or pixels, in the sandbox
families  the supported families; without mlx
"""
