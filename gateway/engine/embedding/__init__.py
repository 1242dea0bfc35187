"""Embedding models: texts → vectors. Rerankers: pairs of texts → scores.

engine            embedding models
loading           a folder → an embedding model
passes            a batch → passes of an encoder
cross_encoder     rerankers with a classification head on an encoder
label_scorer      rerankers on a causal model
tokenizer         texts → token ids
bert              BERT, RoBERTa and XLM-RoBERTa encoders
packed            BERT's layers on a CPU with AVX-512, their weights packed once
rotary_bert       BERT with rotary positions: nomic-bert, GTE, jina-embeddings-v3
modernbert        the ModernBERT encoder
decoder           a decoder-only model as an embedder
embedding_gemma2  EmbeddingGemma 2's text model
outputs           hidden states → weights of tokens, or a vector for each token
colbert           ColBERT's markers and expanded queries
pooling           hidden states → one vector per row
"""
