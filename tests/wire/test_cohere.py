"""Vectors in Cohere's types, and the pieces of a large answer."""

import base64
from typing import Any

import numpy as np
import orjson
import pytest

from gateway.jobs.embed import Embedded
from gateway.wire.cohere import CohereRequest, quantize, write_pieces
from gateway.wire.validation import read_request


def some_vectors(rows: int, dimensions: int, *, outlier: float = 1.0) -> Any:
    vectors = np.random.default_rng(5).normal(size=(rows, dimensions)).astype(np.float32)
    vectors[:, 0] *= outlier
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("dimensions", [4, 384, 1024, 2560])
@pytest.mark.parametrize("outlier", [1, 4])
def test_int8_keeps_cosines_and_dot_products(dimensions: int, outlier: float) -> None:
    """Also between vectors of different requests, since the scale is the same for all."""
    vectors = some_vectors(50, dimensions, outlier=outlier)
    numbers = quantize(vectors, "int8")
    assert -127 <= numbers.min() <= numbers.max() <= 127
    again = np.concatenate([quantize(vectors[i : i + 1], "int8") for i in range(50)])
    assert (numbers == again).all()
    wide = numbers.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1)
    cosines = (wide @ wide.T) / np.outer(lengths, lengths)
    assert np.abs(cosines - vectors @ vectors.T).max() < 0.01
    assert lengths.max() / lengths.min() < 1.05
    assert (quantize(vectors, "uint8") == wide + 128).all()


@pytest.mark.parametrize("dimensions", [8, 9, 384])
def test_bits_are_packed_as_sentence_transformers_packs_them(dimensions: int) -> None:
    vectors = some_vectors(5, dimensions)
    unsigned, signed = quantize(vectors, "ubinary"), quantize(vectors, "binary")
    bits = np.unpackbits(unsigned.astype(np.uint8), axis=1)
    assert (bits[:, :dimensions] == (vectors > 0)).all()
    assert not bits[:, dimensions:].any()
    assert (signed == unsigned - 128).all()
    assert -128 <= signed.min() <= signed.max() <= 127


def read(**fields: Any) -> CohereRequest:
    return read_request(orjson.dumps(fields), CohereRequest, strict=True).request


def test_a_large_answer_comes_in_pieces_that_are_one_document() -> None:
    vectors = some_vectors(200, 1024)
    texts = [str(index) for index in range(200)]
    request = read(texts=texts, embedding_types=["float", "binary", "base64"])
    pieces = list(write_pieces(Embedded(vectors, 7, 0), request, texts, "1", name="embd-1"))
    assert max(map(len, pieces)) < 1_500_000
    body = orjson.loads(b"".join(pieces))
    assert body["texts"] == texts
    found = body["embeddings"]
    assert np.array(found["float"], np.float32) == pytest.approx(vectors, abs=1e-6)
    assert np.array(found["binary"]).shape == (200, 128)
    decoded = np.frombuffer(base64.b64decode(found["base64"][199]), "<f4")
    assert decoded == pytest.approx(vectors[199], abs=1e-6)


def test_a_type_that_is_asked_for_twice_is_written_once() -> None:
    request = read(texts=["a"], embedding_types=["int8", "int8"])
    pieces = write_pieces(
        Embedded(some_vectors(1, 8), 1, 0), request, ["a"], name="embd-1", version="2"
    )
    assert b"".join(pieces).count(b'"int8"') == 1
