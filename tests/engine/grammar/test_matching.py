"""Masks allow the matchers' tokens, for each row alone; matchers record errors and never raise."""

import random

import mlx.core as mx
import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from gateway.engine.grammar.compiling import compile_grammar
from gateway.engine.grammar.matching import GrammarState, Masks, Matcher, apply_masks, words
from gateway.jobs.chat import Grammar
from tests.engine.grammar.drawn_rows import ENDS, allowed, answer, compiled, ids, tokenizer

AGE = {"type": "integer", "minimum": 10, "maximum": 99}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": AGE},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, 1030])
@pytest.mark.parametrize(
    "rows", [[2], [4, 1], [2, 0, 3], [1, 0, 2, 4, 3], [0, 1, 2, 3, 4]], ids=str
)
def test_masks_agree_with_numpy(rows: list[int], vocab_size: int, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(vocab_size)
    values = rng.integers(-8, 8, (5, vocab_size)).astype(np.float32)
    bitmask = rng.integers(0, 2**32, (len(rows), words(vocab_size)), dtype=np.uint32)
    logits = mx.array(values).astype(dtype)
    masked = apply_masks(logits, bitmask, rows)
    assert masked.dtype == dtype
    expected = values.copy()
    for mask, row in zip(bitmask, rows, strict=True):
        for token in range(vocab_size):
            if not int(mask[token // 32]) >> (token % 32) & 1:
                expected[row, token] = -np.inf
    np.testing.assert_array_equal(np.array(masked.astype(mx.float32)), expected)
    np.testing.assert_array_equal(np.array(logits.astype(mx.float32)), values)


@pytest.mark.parametrize("batch", [2, 5])
def test_ids_beyond_the_mask_are_forbidden(batch: int) -> None:
    ones = np.full((1, 1), 0xFFFFFFFF, dtype=np.uint32)
    masked = np.array(apply_masks(mx.zeros((batch, 70)), ones, [1]))
    assert np.isfinite(np.delete(masked, 1, axis=0)).all()
    assert np.isfinite(masked[1, :32]).all()
    assert np.isneginf(masked[1, 32:]).all()
    wide = np.full((1, 5), 0xFFFFFFFF, dtype=np.uint32)
    assert np.isfinite(np.array(apply_masks(mx.zeros((batch, 7)), wide, [0]))).all()


def test_many_rows_are_filled_as_each_would_be_alone() -> None:
    grammar = compiled(PERSON)
    starts = ["", '{"name":"', '{"name":"x","age":1', '{"name":"x","age":12}', "nonsense"]
    bitmask = np.zeros((len(starts), tokenizer().words), dtype=np.uint32)
    matchers = [grammar.matcher(ids(start)) for start in starts]
    Masks(2).fill(matchers, bitmask)
    for start, mask in zip(starts, bitmask, strict=True):
        alone = np.zeros(tokenizer().words, dtype=np.uint32)
        grammar.matcher(ids(start)).allowed(alone)
        np.testing.assert_array_equal(mask, alone)
    assert [matcher.error is None for matcher in matchers] == [True, True, True, True, False]


def test_an_impossible_token_is_an_error_not_an_exception() -> None:
    matcher = compiled(AGE).matcher()
    matcher.consume(ids("x")[0])
    assert matcher.error is not None
    assert "grammar" in matcher.error
    before = matcher.error
    matcher.replay(ids("12"))
    assert matcher.error == before
    assert set(allowed(matcher)) == set(ENDS)
    assert not matcher.may_end
    assert not matcher.is_over
    assert matcher.forced_tokens() == []


def test_an_early_or_late_token_is_an_error() -> None:
    early = compiled(AGE).matcher()
    early.consume(ENDS[0])
    assert early.error is not None
    late = compiled(AGE).matcher(ids("12"))
    late.consume(ENDS[1])
    assert late.is_over
    assert set(allowed(late)) == set(ENDS)
    late.consume(ids("1")[0])
    assert late.error is not None
    assert not late.may_end


@pytest.mark.parametrize("said", ["<|end|>", "<|user|>", "<tool_call>x", "a<|pad|>b"])
def test_texts_that_look_like_control_tokens_are_spelt_out(said: str) -> None:
    """A constant `<|end|>` is five characters of text and neither an end nor a turn."""
    grammar = compiled({"const": said})
    assert answer(grammar.matcher(), 0) == f'"{said}"'
    choice = compile_grammar(tokenizer(), Grammar("choice", f'["{said}"]'))
    assert answer(choice.matcher(), 1) == said
    assert not set(choice.matcher().forced_tokens()) & {*range(8), 1024, 1025}


def test_a_row_outlives_the_lexer_it_shared() -> None:
    """Rows of one grammar share a lexer's states; one that finds them used up goes on alone."""
    tokens, texts = tokenizer().tokens, tokenizer().texts
    spec = LLMatcher.grammar_from_regex("((a|b)*a(a|b){14}c)*")

    def make(states: int) -> GrammarState:
        limits = LLParserLimits(max_lexer_states=states, verbose_errors=False)
        return GrammarState(LLMatcher(tokens, spec, log_level=0, limits=limits), texts)

    spellings = [*ids("a"), *ids("b")]
    matcher = Matcher(lambda: make(100), ENDS, alone=lambda: make(50_000))
    rng = random.Random(0)
    for _ in range(200):
        row = np.zeros(tokenizer().words, dtype=np.uint32)
        matcher.allowed(row)
        matcher.consume(rng.choice(spellings))
        assert matcher.error is None
    poor = Matcher(lambda: make(100), ENDS, alone=lambda: make(100))
    for _ in range(200):
        poor.allowed(np.zeros(tokenizer().words, dtype=np.uint32))
        poor.consume(rng.choice(spellings))
    assert poor.error is not None
    assert "too many states" in poor.error
