"""Texts → vectors, and pairs of texts → scores.

engine          one encoder: a batch cut into passes, run, put back in order; embedding models
cross_encoder   one reranker: encode pairs, score; the heads
label_scorer    one reranker on a causal model: the log-odds of two labels
tokenizer       texts → token ids, truncated as the model's own tokenizer would; pairs joined
bert            BERT, RoBERTa and XLM-RoBERTa encoders
rotary_bert     BERT with rotary positions: nomic-bert, GTE, jina-embeddings-v3
modernbert      the ModernBERT encoder
decoder         a decoder-only model as an embedder
pooling         hidden states → one vector a row
"""
