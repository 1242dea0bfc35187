"""Unchanged clients of text-embeddings-inference that ask an address for vectors."""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

os.environ["ANONYMIZED_TELEMETRY"] = "False"

import numpy as np
from chromadb.utils.embedding_functions import HuggingFaceEmbeddingServer
from huggingface_hub import InferenceClient
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

TEXTS = ["A dog barks at strangers.", "A hound growls.", "Paris lies on the Seine."]
Embed = Callable[[Sequence[str]], Any]


def hub(url: str) -> Embed:
    """A text at a time."""
    client = InferenceClient(model=f"{url}/embed")
    options: dict[str, Any] = {
        "normalize": True, "truncate": True, "truncation_direction": "right"
    }  # fmt: skip
    return lambda texts: [client.feature_extraction(text, **options)[0] for text in texts]


def llama_index(url: str) -> Embed:
    """Its batches; it writes an instruction before each text, by the model's name."""
    return _llama_index(url).get_text_embedding_batch


def llama_index_async(url: str) -> Embed:
    """The same, at once."""
    client = _llama_index(url)
    return lambda texts: asyncio.run(client.aget_text_embedding_batch(list(texts)))


def llama_index_queries(url: str) -> Embed:
    """Each as a query."""
    client = _llama_index(url)
    return lambda texts: [client.get_query_embedding(text) for text in texts]


def _llama_index(url: str) -> TextEmbeddingsInference:
    return TextEmbeddingsInference(model_name="all-minilm-l6-v2", base_url=url, timeout=60)


def chroma(url: str) -> Embed:
    """Use the gateway as a collection's embedding function."""
    server = HuggingFaceEmbeddingServer(url=f"{url}/embed")
    return lambda texts: server(list(texts))


CLIENTS = [hub, llama_index, llama_index_async, llama_index_queries, chroma]


def main(url: str) -> None:
    """Print the name of each client whose vectors are of length one, and of their texts."""
    for client in CLIENTS:
        vectors = np.array(client(url)(TEXTS))
        assert vectors.shape == (3, 384), vectors.shape
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        dog, hound, paris = vectors
        assert dog @ hound > dog @ paris
        print(client.__name__)


if __name__ == "__main__":
    main(sys.argv[1])
