"""Images in prompts: a file's pixels → a tower's features, in the place of tokens' embeddings.

sight     the images of a model's sequences: encoded once, and read with their prompts
features  the features of images that were encoded lately
reading   a decoder of mlx-lm's that reads features
rotation  M-RoPE, in the place of a decoder's rope
layout    the positions of a prompt's tokens
towers    a checkpoint's tower, opened and read
qwen      the tower of Qwen3-VL and Qwen3.5 to 3.8
prompts   a job's images → spans of its prompt
patches   pixels → patches, and the size that a family wants an image in
pictures  a file → its size, or its pixels at another size; read in the sandbox, never here
families  the families whose images are read, known by their files; without mlx
"""
