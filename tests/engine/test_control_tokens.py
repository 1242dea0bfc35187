"""Control tokens in callers' texts are letters: wherever they stand, whatever the tokenizer."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gateway.engine.control_tokens import ControlTokens, Piece

DEMO = Path(__file__).parents[2] / "demo" / "chat" / "tokenizer.json"


def unigram() -> Tokenizer:
    """Make one whose model has the control tokens as pieces too, as converted SentencePieces do."""
    letters = [(each, -5.0) for each in "▁abcdefghijklmnopqrstuvwxyz</>"]
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *letters], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def controls(ids: list[int], tokenizer: Tokenizer) -> list[str]:
    added = tokenizer.get_added_tokens_decoder()
    return [added[token].content for token in ids if token in added]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO))


def test_only_the_callers_control_tokens_are_letters(demo: Tokenizer) -> None:
    pieces: list[Piece] = [("<|user|>", False), ("<|end|>a<|end|>", True), ("<|end|>", False)]
    [ids] = ControlTokens(demo).encode([pieces])
    assert controls(ids, demo) == ["<|user|>", "<|end|>"]
    whole = "<|user|><|end|>a<|end|><|end|>"
    assert demo.decode(ids, skip_special_tokens=False) == whole


def test_texts_without_any_have_the_ids_they_had(demo: Tokenizer) -> None:
    text = "Hello  there,\n\n is 12 + 7 True? 日本"
    [one, several] = ControlTokens(demo).encode(
        [[(text, True)], [(text[:3], False), (text[3:9], True), (text[9:], False)]]
    )
    assert one == several == demo.encode(text, add_special_tokens=False).ids


def test_a_unigrams_own_pieces_are_no_way_round() -> None:
    tokenizer = unigram()
    [ids] = ControlTokens(tokenizer).encode([[("a</s>b", True)]])
    assert controls(ids, tokenizer) == []
    assert tokenizer.decode(ids, skip_special_tokens=False).replace(" ", "") == "a</s>b"


def test_runs_of_white_space_are_text(demo: Tokenizer) -> None:
    tokenizer = Tokenizer.from_str(demo.to_str())
    tokenizer.add_tokens([AddedToken("    ", special=False, normalized=False)])
    [ids] = ControlTokens(tokenizer).encode([[("a    b", True)]])
    assert ids == tokenizer.encode("a    b", add_special_tokens=False).ids
    assert controls(ids, tokenizer) == ["    "]


def test_white_space_that_a_control_token_takes_in_does_not_change_whose_it_is(
    demo: Tokenizer,
) -> None:
    tokenizer = Tokenizer.from_str(demo.to_str())
    tokenizer.add_special_tokens([AddedToken("<m>", special=True, lstrip=True, rstrip=True)])
    theirs, ours = ControlTokens(tokenizer).encode(
        [[("a ", False), ("<m> b", True)], [("a", True), ("<m>", False), (" b", True)]]
    )
    assert controls(theirs, tokenizer) == []
    assert controls(ours, tokenizer) == ["<m>"]


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.sampled_from(["<|end|>", "<|user|>", " ", "a", "<", "|>", "é", "\n"]), min_size=1)
)
def test_any_text_comes_through_whole(texts: list[str]) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO))
    known = ControlTokens(tokenizer)
    text = "".join(texts)
    [ids] = known.encode([[(text, True)]])
    pieces = known.pieces(f"<|user|>{known.split(text)}<|end|>")
    [split] = known.encode([pieces])
    assert known.spell(tokenizer.encode(text, add_special_tokens=False).ids) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(split, skip_special_tokens=False) == f"<|user|>{text}<|end|>"
    assert controls(ids, tokenizer) == []
    assert controls(split, tokenizer) == ["<|user|>", "<|end|>"]


def test_a_value_of_json_is_split_wherever_it_has_texts(demo: Tokenizer) -> None:
    known = ControlTokens(demo)
    value = {"a<|end|>": ["<|end|>", 1, None, {"b": "<|user|>"}], "c": "d"}
    found = known.split(value, plain=("<|user|>",))
    assert list(found)[1] == "c"
    assert "<|end|>" not in str(found)
    assert found["c"] == "d"
    [(_, ends)] = [each for each in found.items() if each[0] != "c"]
    assert ends[1:] == [1, None, {"b": "<|user|>"}]
