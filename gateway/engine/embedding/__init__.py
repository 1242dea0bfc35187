"""Texts → vectors, and pairs of texts → scores.

engine          one embedding model: encode, embed
cross_encoder   one reranker: encode pairs, score; the heads
label_scorer    one reranker on a causal model: the log-odds of two labels
encoder         what both stand on: a batch cut into passes, run, and put back in order
tokenizer       texts → token ids, truncated as the model's own tokenizer would; pairs joined
bert            BERT, RoBERTa and XLM-RoBERTa encoders
modernbert      the ModernBERT encoder
decoder         a decoder-only model as an embedder
kernels         softmax and GELU that are fast on a CPU
pooling         hidden states → one vector a row
"""
