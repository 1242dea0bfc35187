"""An image file → the numbers that a model's tower reads.

pictures  a file → its size, or its pixels at another size; read in the sandbox, never here
patches   pixels → patches, and the size that a family wants an image in
"""
