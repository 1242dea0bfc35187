"""Cohere's SDK, both versions, and LangChain's class, each asking for vectors of the same texts."""

import base64
import struct
import sys
from typing import Any

import cohere
import langchain_cohere
import numpy as np
from cohere.errors import BadRequestError, NotFoundError

MODEL = "all-minilm-l6-v2"
TEXTS = ["A dog barks at strangers.", "A hound growls.", "Paris lies on the Seine."]
TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]


def check(client: str, vectors: Any, tolerance: float = 1e-5) -> None:
    """Print the client's name if the vectors have their order by meaning, and MiniLM's size."""
    numbers = np.array(vectors, dtype=np.float64)
    assert numbers.shape == (3, 384), (client, numbers.shape)
    lengths = np.linalg.norm(numbers, axis=1)
    assert lengths.max() / lengths.min() < 1 + tolerance, (client, lengths)
    dog, hound, paris = numbers
    assert dog @ hound > dog @ paris, client
    print(client)


def cosines(vectors: Any) -> Any:
    numbers = np.array(vectors, dtype=np.float64)
    numbers /= np.linalg.norm(numbers, axis=1, keepdims=True)
    return numbers @ numbers.T


def by_type(client: str, answer: Any) -> None:
    found = answer.embeddings
    assert answer.texts == TEXTS
    assert answer.meta.billed_units.input_tokens > 0
    check(f"{client} float", found.float_)
    check(f"{client} int8", found.int8, 0.02)
    assert np.abs(cosines(found.float_) - cosines(found.int8)).max() < 0.01
    assert (np.array(found.uint8) - 128 == np.array(found.int8)).all()
    bits = np.unpackbits(np.array(found.ubinary, dtype=np.uint8), axis=1)
    assert (bits == (np.array(found.float_) > 0)).all()
    assert (np.array(found.ubinary) - 128 == np.array(found.binary)).all()
    decoded = [struct.unpack("<384f", base64.b64decode(each)) for each in found.base64]
    assert np.allclose(decoded, found.float_, atol=1e-6)


def refused(expected: type[Any], client: Any, given: dict[str, Any]) -> Any:
    """Return the body of the error that the SDK raises."""
    try:
        client.embed(**given)
    except expected as error:
        return error.body
    raise AssertionError(given)


def main(url: str) -> None:
    v2 = cohere.ClientV2("unused", base_url=url)
    asked: dict[str, Any] = {"model": MODEL, "input_type": "search_document"}
    by_type("cohere v2", v2.embed(texts=TEXTS, embedding_types=TYPES, **asked))
    inputs: list[Any] = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    check("cohere v2 inputs", v2.embed(inputs=inputs, **asked).embeddings.float_)
    v1 = cohere.Client("unused", base_url=url)
    by_type("cohere v1", v1.embed(texts=TEXTS, embedding_types=TYPES, **asked))
    lists = v1.embed(texts=TEXTS, **asked)
    assert lists.response_type == "embeddings_floats"
    check("cohere v1 lists", lists.embeddings)
    many = v1.embed(texts=TEXTS * 40, **asked)  # the SDK sends 96 at once, and merges
    assert np.allclose(many.embeddings[-3:], lists.embeddings, atol=1e-5)

    langchain = langchain_cohere.CohereEmbeddings(
        model=MODEL, cohere_api_key="unused", base_url=url
    )
    check("langchain", langchain.embed_documents(TEXTS))
    assert np.allclose(langchain.embed_query(TEXTS[0]), lists.embeddings[0], atol=1e-5)

    for client in (v1, v2):
        for error, given, told in (
            (BadRequestError, {"truncate": "START"}, "'NONE' or 'END'"),
            (BadRequestError, {"images": ["data:image/png;base64,AA"]}, "'images'"),
            (NotFoundError, {"model": "nobody"}, "nobody"),
        ):
            refusal = refused(error, client, {"texts": TEXTS, **asked, **given})
            assert told in refusal["message"], refusal
    print("errors")


main(sys.argv[1])
