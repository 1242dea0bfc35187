"""Embedding models: texts → vectors. Rerankers: pairs of texts → scores.

engine          embedding models, and passes over batches
cross_encoder   rerankers with a classification head on an encoder
label_scorer    rerankers on a causal model
tokenizer       texts → token ids
bert            BERT, RoBERTa and XLM-RoBERTa encoders
packed          BERT layers on a CPU with AVX-512, their weights packed once
rotary_bert     BERT with rotary positions: nomic-bert, GTE, jina-embeddings-v3
modernbert      the ModernBERT encoder
decoder         a decoder-only model as an embedder
pooling         hidden states → one vector per row
"""
