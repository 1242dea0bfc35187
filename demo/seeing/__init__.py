"""demo-vision, a model that reads images: its weights are in `demo/vision`.

drawing.py     scenes from a seed, and their pictures
questions.py   questions about a scene, with their answers
tokens.py      the tokenizer and the chat template
batches.py     scenes to arrays
forward.py     the forward pass of tower and decoder, for training
train.py       python -m demo.seeing.train --out DIR --minutes N
evaluate.py    python -m demo.seeing.evaluate [--model DIR]
"""
