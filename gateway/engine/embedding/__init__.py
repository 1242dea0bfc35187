"""Texts → vectors.

engine       one model: encode, cut a batch into passes, embed
tokenizer    texts → token ids, truncated as the model's own tokenizer would
bert         BERT, RoBERTa and XLM-RoBERTa encoders
decoder      a decoder-only model as an embedder
kernels      softmax and GELU that are fast on a CPU
pooling      hidden states → one vector a row
"""
