"""A model that says anything its grammar allows: random rows over the demo tokenizer."""

import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.tokenizer_utils import load

from gateway.engine.grammar.compiling import CompiledGrammar, GrammarBounds, compile_grammar
from gateway.engine.grammar.matching import Matcher
from gateway.engine.grammar.schema_bounds import Shape
from gateway.engine.grammar.tokenizer import GrammarTokenizer
from gateway.jobs.chat import Grammar

DEMO = Path(__file__).parents[3] / "demo" / "chat"
VOCAB = 1030  # four more logits than the tokenizer has tokens
ENDS = (0, 2)
CLOSERS = (b'"', b"}", b"]", b'"}', b'"]', b"}]", b'"}]', b"}}")
OPEN = Shape(complete=False, closed=False)


@functools.cache
def tokenizer() -> GrammarTokenizer:
    """Build the grammar tokenizer of the demo model once."""
    return GrammarTokenizer(load(DEMO)._tokenizer, vocab_size=VOCAB, eos_ids=ENDS)


def schema_grammar(schema: Any, *, strict: bool = False) -> Grammar:
    """Write a schema as wire does."""
    return Grammar("json_schema", json.dumps(schema), strict=strict)


def compiled(
    schema: Any, shape: Shape = OPEN, *, strict: bool = False, bounds: GrammarBounds | None = None
) -> CompiledGrammar:
    """Compile a schema for the demo tokenizer."""
    grammar = schema_grammar(schema, strict=strict)
    return compile_grammar(tokenizer(), grammar, shape=shape, bounds=bounds)


def ids(text: str) -> list[int]:
    """Spell a text with the demo tokens."""
    return tokenizer().tokens.tokenize_str(text)


def allowed(matcher: Matcher) -> list[int]:
    """List the tokens that may come next."""
    row = np.zeros(tokenizer().words, dtype=np.uint32)
    matcher.allowed(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def step(matcher: Matcher, rng: random.Random) -> int | None:
    """Say one random token and give it; None at the end. Closing things is preferred."""
    tokens = allowed(matcher)
    assert matcher.error is None, matcher.error
    assert matcher.may_end == any(end in tokens for end in ENDS)
    assert matcher.may_end == all(end in tokens for end in ENDS)
    if matcher.is_over or (matcher.may_end and rng.random() < 0.4):
        return None
    tokens = [token for token in tokens if token not in ENDS]
    closing = [t for t in tokens if tokenizer().tokens.decode_bytes([t]) in CLOSERS]
    token = rng.choice(closing if closing and rng.random() < 0.5 else tokens)
    matcher.consume(token)
    return token


def answer(matcher: Matcher, seed: int, limit: int = 3000) -> str:
    """Talk at random until the end; the text must be UTF-8."""
    rng = random.Random(seed)
    said: list[int] = []
    while (token := step(matcher, rng)) is not None:
        said.append(token)
        assert len(said) < limit, text(said)[:200]
    return text(said)


def text(tokens: list[int]) -> str:
    """Spell tokens out."""
    return tokenizer().tokens.decode_bytes(tokens).decode()
