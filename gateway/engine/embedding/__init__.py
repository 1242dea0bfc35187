"""Embedding models: texts → vectors. Rerankers: pairs of texts → scores.

engine          run an encoder over batches, cut into passes; embedding models
cross_encoder   rerankers with a classification head on an encoder
label_scorer    rerankers on a causal model, which score by the log-odds of two labels
tokenizer       texts → token ids, truncated as the model's own tokenizer would; pairs joined
bert            BERT, RoBERTa and XLM-RoBERTa encoders
rotary_bert     BERT with rotary positions: nomic-bert, GTE, jina-embeddings-v3
modernbert      the ModernBERT encoder
decoder         a decoder-only model as an embedder
pooling         hidden states → one vector per row
"""
