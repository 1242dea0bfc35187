"""Images in prompts: a file's pixels → features that replace the embeddings of tokens.

sight          the images of sequences, encoded once and read with their prompts
features       a cache of images' features
towers         loading of a checkpoint's vision tower
kinds          the classes of each family
image_setup    the decision whether and how a model reads images; without mlx
tower_numbers  the numbers of towers in config.json; without mlx
overlay        Gemma's decoders, with masks that open images
reading        a decoder of mlx-lm's that reads features
rotation       M-RoPE instead of a decoder's rope
layout         the positions of a prompt's tokens
qwen           the tower of Qwen3-VL and Qwen3.5 to 3.8
qwen_windows   the tower of Qwen2.5-VL
pixtral        the tower of Pixtral, Mistral 3 and Ministral 3
siglip         the tower of Gemma 3
gemma4         the tower of Gemma 4
parts          a tower's work in parts
gemma_patches  the sizes of Gemma's images
prompts        a job's images → spans of its prompt
patches        pixels → patches, and the sizes of images
pictures       an image file → its size or pixels, in the sandbox
families       the supported families; without mlx
"""
