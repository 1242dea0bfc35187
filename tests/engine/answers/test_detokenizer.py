"""Text as it grows: whole characters, and no part of a stop string."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.engine.answers.detokenizer import Detokenizer, Vocabulary
from gateway.engine.answers.stop_strings import StopScanner, held_back

DEMO = Path(__file__).parents[3] / "demo" / "chat" / "tokenizer.json"
TOKENIZER: Tokenizer = Tokenizer.from_file(str(DEMO))
VOCABULARY = Vocabulary(TOKENIZER)


BYTES = {
    VOCABULARY.bytes(token)[0]: token
    for token in range(TOKENIZER.get_vocab_size())
    if len(VOCABULARY.bytes(token)) == 1
}
ODD = st.sampled_from("\ufdd0\ufdd1\ufdd2\ufffd")


def stream(text: str, stops: tuple[str, ...] = ()) -> tuple[list[str], StopScanner]:
    """Push a text's tokens one at a time."""
    decoder, scanner = Detokenizer(VOCABULARY), StopScanner(stops)
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    pieces = [scanner.push(decoder.push(token)) for token in ids]
    return [*pieces, scanner.flush()], scanner


@given(st.text(st.one_of(st.characters(exclude_categories=["Cs"]), ODD), max_size=60))
def test_any_text_comes_through_whole_in_whole_characters(text: str) -> None:
    pieces, _ = stream(text)
    assert "".join(pieces) == TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("text", ["\ufffd", "a\ufffd", "\ufffd\ufffdb", "🙂\ufffd🙂"])
def test_a_replacement_character_that_the_tokens_say_is_text(text: str) -> None:
    decoder = Detokenizer(VOCABULARY)
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert "".join(decoder.push(token) for token in ids) == text


@given(st.binary(max_size=12), st.booleans())
def test_bytes_have_the_text_of_their_whole_characters(given: bytes, continues: bool) -> None:
    ids = [BYTES[byte] for byte in (*given, *b"\n")]
    decoder = Detokenizer(VOCABULARY, continues=continues)
    assert "".join(map(decoder.push, ids)) == given.decode(errors="ignore") + "\n"


def test_the_texts_and_bytes_of_a_texts_tokens_make_the_text() -> None:
    """Half a character has bytes alone."""
    ids = TOKENIZER.encode("Hello there, is 12 + 7 True?", add_special_tokens=False).ids
    assert "".join(map(VOCABULARY.text, ids)) == "Hello there, is 12 + 7 True?"
    ids = TOKENIZER.encode("🙂日", add_special_tokens=False).ids
    assert len(ids) > 2
    assert b"".join(map(VOCABULARY.bytes, ids)) == "🙂日".encode()


def test_half_a_character_at_the_end_is_dropped() -> None:
    ids = TOKENIZER.encode("ok🙂", add_special_tokens=False).ids
    decoder = Detokenizer(VOCABULARY)
    assert "".join(decoder.push(token) for token in ids[:-1]) == "ok"


def sentencepiece() -> Tokenizer:
    """Return a tokenizer like Llama 2's.

    It writes unknown characters as bytes, and a space before the first word, which its decoder
    drops.
    """
    words = ["▁The", "▁Paris", "▁", "a", "b", "▁Hello", ".", "\ufffd"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE(
            {name: i for i, name in enumerate(names)},
            [],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


SPM = sentencepiece()


def piece(text: str) -> int:
    token: int | None = SPM.token_to_id(text)
    assert token is not None
    return token


def decoder(*, continues: bool = False) -> Detokenizer:
    return Detokenizer(Vocabulary(SPM), continues=continues)


def test_sentencepiece_spaces_and_bytes_are_decoded() -> None:
    """If pieces stayed raw, a reranker's scores would be inverted without an error."""
    vocabulary = Vocabulary(SPM)
    assert [vocabulary.text(piece(word)) for word in ("▁The", "a")] == [" The", "a"]
    found = [vocabulary.bytes(piece(f"<0x{byte:02X}>")) for byte in "🙂".encode()]
    assert b"".join(found) == "🙂".encode()


def test_the_first_word_of_a_text_that_goes_on_keeps_its_space() -> None:
    """SentencePiece drops that of a text's first word, which an answer's first word is."""
    tokens = [piece("▁Paris"), piece(".")]
    assert "".join(map(decoder(continues=True).push, tokens)) == " Paris."
    assert "".join(map(decoder().push, tokens)) == "Paris."


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["▁", "\ufffd"], "\ufffd"),
        (
            ["▁Hello", "<0x0A>", "<0xF0>", "<0x9F>", "▁Hello", "<0xE2>", "▁Hello"],
            "Hello\n Hello Hello",
        ),
        (["▁", "<0xF0>", "▁Hello"], " Hello"),
        (["<0xF0>", "▁Hello"], " Hello"),
        (["▁Hello", "▁", "\ufffd"], "Hello \ufffd"),
        (["<0xEF>", "<0xBF>", "<0xBD>", "▁Hello"], "\ufffd Hello"),
        (["<0x0A>", "<0xF0>", "<0xEF>", "<0xBF>", "<0xBD>", "a"], "\n\ufffda"),
        (["<0x0A>", "<0xF0>", "<0x41>", "▁Hello", "a"], "\nA Helloa"),
    ],
)
def test_characters_beside_bytes_that_are_none_are_text(tokens: list[str], text: str) -> None:
    """The tokenizer's own decoder makes U+FFFD of a whole run of bytes then."""
    assert "".join(map(decoder().push, map(piece, tokens))) == text


@given(st.lists(st.one_of(st.integers(3, 258), st.sampled_from([262, 264])), max_size=40))
def test_any_tokens_have_a_text(tokens: list[int]) -> None:
    growing = decoder(continues=True)
    text = "".join(map(growing.push, tokens))
    assert text.count(" Hello") == tokens.count(264)


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_a_stop_string_ends_the_text_before_it(text: str, stops: list[str]) -> None:
    pieces, growing = stream(text, tuple(stops))
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    assert growing.is_stopped == bool(found)
    assert "".join(pieces) == (text[: min(found)[1]] if found else text)


@pytest.mark.parametrize(
    ("text", "stops", "held"),
    [
        ("abc", ["cd"], 1),
        ("abc", ["bcd", "cd"], 2),
        ("abc", ["x"], 0),
        ("abc", [], 0),
        ("", ["a"], 0),
    ],
)
def test_only_what_may_begin_a_stop_is_held_back(text: str, stops: list[str], held: int) -> None:
    assert held_back(text, stops) == held
