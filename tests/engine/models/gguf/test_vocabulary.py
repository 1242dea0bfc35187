"""GGUF tokenizers make the ids that llama.cpp makes, and wrong metadata are refused by name."""

import json
import random
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gateway.engine.grammar.compiling import compile_grammar
from gateway.engine.grammar.schema_bounds import Shape
from gateway.engine.grammar.tokenizer import GrammarTokenizer
from gateway.engine.models.gguf.vocabulary import (
    SPLITTINGS,
    named_ends,
    read_end_ids,
    read_tokenizer,
)
from gateway.jobs.chat import Grammar

GOLDEN = Path(__file__).parents[3] / "golden" / "gguf"
TEXTS = json.loads((GOLDEN / "texts.json").read_text())
GGML = "tokenizer.ggml."
Metadata = dict[str, Any]


@cache
def load(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def golden(name: str) -> list[list[int]]:
    """Return the golden ids of all texts; those that GPT-2's rule cuts alike are written once."""
    ids = load("ids")
    rows = zip(ids[name]["ids"], ids["gpt-2"]["ids"], strict=True)
    return [plain if row is None else row for row, plain in rows]


@cache
def tokenizer(name: str) -> Any:
    if name.startswith("llama, "):
        prefixes = name.endswith("true")
        return read_tokenizer({**load("sentencepiece"), f"{GGML}add_space_prefix": prefixes})
    return read_tokenizer({**load("byte_level"), f"{GGML}pre": name})


NAMES = [
    *("gpt-2", "default", "smollm", "llama-bpe", "qwen2", "deepseek-r1-qwen", "tekken"),
    *("deepseek-coder", "llama, add_space_prefix true", "llama, add_space_prefix false"),
]


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_llama_cpp(name: str) -> None:
    encode = tokenizer(name).encode
    wrong = [
        text
        for text, ids in zip(TEXTS, golden(name), strict=True)
        if encode(text, add_special_tokens=False) != ids
    ]
    assert not wrong


@pytest.mark.parametrize("name", NAMES)
def test_texts_come_back_from_their_ids(name: str) -> None:
    """Those that llama.cpp gets back; Qwen2's tokenizer composes them."""
    each = tokenizer(name)
    for place in load("ids")[name]["returned"]:
        text = TEXTS[place]
        if name == "qwen2":
            text = unicodedata.normalize("NFC", text)
        assert each.decode(each.encode(text, add_special_tokens=False)) == text


def test_every_name_of_a_rule_has_golden_ids() -> None:
    """A name without its own shares a rule with one that has."""
    proven = [SPLITTINGS[name] for name in NAMES if name in SPLITTINGS]
    assert all(rule in proven for rule in SPLITTINGS.values())


def test_the_part_of_smollm2_that_the_texts_need_makes_its_ids() -> None:
    """Its vocabulary's ids are those of the whole one, listed beside the part."""
    part = dict(load("smollm2"))
    places = part.pop("ids")
    each: Any = read_tokenizer(part)
    for text, ids in zip(TEXTS, golden("SmolLM2"), strict=True):
        made = each.encode(text, add_special_tokens=False)
        assert [places[token] for token in made] == ids
        assert each.decode(made) == text
    assert each.bos_token == "<|im_start|>"
    assert each.eos_token == "<|im_end|>"
    assert len(each.backend_tokenizer.get_added_tokens_decoder()) == 17
    said = each.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert said.endswith("<|im_start|>user\nHi<|im_end|>\n")


# What each kind needs, and no more.

LETTERS = [chr(sign) for sign in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144))]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(**values: Any) -> Metadata:
    """Write a byte-level vocabulary: two special tokens, a user's own, all bytes, two words."""
    tokens = ["<s>", "<|im_end|>", "<think>", *LETTERS, "he", "Ġhe", "the"]
    return {
        f"{GGML}model": "gpt2",
        f"{GGML}pre": "llama-bpe",
        f"{GGML}tokens": tokens,
        f"{GGML}token_type": [3, 3, 4] + [1] * (len(tokens) - 3),
        f"{GGML}merges": ["h e", "Ġ he"],
        f"{GGML}bos_token_id": 0,
        f"{GGML}eos_token_id": 1,
    } | {GGML + key: value for key, value in values.items()}


def pieces(**values: Any) -> Metadata:
    """Write a vocabulary of SentencePiece's: required tokens, some letters and words."""
    words = ["▁", "t", "h", "e", "he", "▁t", "th"]
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *words]
    types = [2, 3, 3] + [6] * 256 + [1] * len(words)
    return {
        f"{GGML}model": "llama",
        f"{GGML}tokens": tokens,
        f"{GGML}token_type": types,
        f"{GGML}scores": [0.0] * 259 + [-float(place) for place in range(len(words))],
    } | {GGML + key: value for key, value in values.items()}


def without(metadata: Metadata, key: str) -> Metadata:
    return {each: value for each, value in metadata.items() if each != GGML + key}


@pytest.mark.parametrize(
    ("metadata", "ids"),
    [
        (byte_level(), [0, 259]),  # Llama 3's begin so
        (byte_level(add_bos_token=False), [259]),
        (byte_level(pre="gpt-2"), [259]),
        (byte_level(pre="gpt-2", add_bos_token=True, add_eos_token=True), [0, 259, 1]),
        (without(byte_level(), "bos_token_id"), [259]),
        (pieces(), [1, 259, 263]),
        (pieces(add_bos_token=False, add_eos_token=True), [259, 263, 2]),
        (pieces(bos_token_id=0, add_space_prefix=False), [0, 263]),
    ],
)
def test_texts_begin_and_end_as_the_file_or_its_kind_says(
    metadata: Metadata, ids: list[int]
) -> None:
    assert read_tokenizer(metadata).encode("he") == ids


def test_special_tokens_are_those_of_their_types() -> None:
    each = read_tokenizer(byte_level(padding_token_id=0))
    ids = each.encode("he<think><|im_end|>", add_special_tokens=False)
    assert ids == [259, 2, 1]
    assert each.decode(ids, skip_special_tokens=True) == "he<think>"
    assert (each.bos_token, each.eos_token, each.pad_token) == ("<s>", "<|im_end|>", "<s>")
    assert each.unk_token is None


def test_a_token_that_ends_answers_is_special_whatever_its_type() -> None:
    """Old files have no types at all."""
    for metadata in (byte_level(token_type=[1] * 262), without(byte_level(), "token_type")):
        each = read_tokenizer(metadata)
        assert each.encode("<|im_end|>", add_special_tokens=False) == [1]
        assert each.decode([1, 259], skip_special_tokens=True) == "he"


def test_ends_are_named_by_the_file_or_by_themselves() -> None:
    assert read_end_ids(byte_level(eos_token_id=5, eot_token_id=6, eom_token_id=7)) == {1, 5, 6, 7}
    assert read_end_ids(without(byte_level(), "eos_token_id")) == {1}
    assert read_end_ids(pieces()) == {2}


def test_the_end_of_a_message_ends_no_answer_where_other_tokens_do() -> None:
    ids = {"<|end|>": 3, "<|endoftext|>": 4}
    assert named_ends(ids) == {3, 4}
    assert named_ends({**ids, "<|return|>": 5}) == {3, 4}
    assert named_ends({**ids, "<|return|>": 5, "<|call|>": 6}) == {4}
    assert named_ends({**ids, "<|flush|>": 5, "<|calls|>": 6}) == {4}


def test_chat_templates_come_along() -> None:
    """One is the template; several go by their names, as transformers has them."""
    key = "tokenizer.chat_template"
    assert read_tokenizer(byte_level()).chat_template is None
    assert read_tokenizer({**byte_level(), key: "a"}).chat_template == "a"
    named = {**byte_level(), key: "a", f"{key}s": ["tool_use"], f"{key}.tool_use": "b"}
    each = read_tokenizer(named)
    assert each.chat_template == {"default": "a", "tool_use": "b"}
    assert each.get_chat_template(tools=[{"type": "function"}]) == "b"
    assert read_tokenizer({**byte_level(), f"{key}.rag": "c"}).chat_template == {"rag": "c"}


def test_tokens_without_text_are_told_from_one_another() -> None:
    metadata = byte_level()
    metadata[f"{GGML}tokens"] += ["", ""]
    metadata[f"{GGML}token_type"] += [1, 1]
    assert len(read_tokenizer(metadata)) == 264


def test_a_padding_token_that_is_none_is_left_out() -> None:
    """Files of models whose padding token came after their weights name one; none pads here."""
    assert read_tokenizer(pieces(padding_token_id=266)).pad_token is None


@pytest.mark.parametrize("name", ["qwen2", "llama, add_space_prefix true"])
def test_grammars_are_held_over_both_kinds(name: str) -> None:
    """llguidance takes each token for the bytes that the tokenizer decodes it to."""
    each = tokenizer(name)
    grammars = GrammarTokenizer(each, vocab_size=len(each) + 5, eos_ids=[2])
    added = each.backend_tokenizer.get_added_tokens_decoder()
    probe = each.encode("a", add_special_tokens=False)[-1:]
    shown = len(each.decode(probe))
    for token, text in enumerate(each.convert_ids_to_tokens(range(len(each)))):
        if text in ("ÿ", "<0xFF>"):  # a byte that no text has; it marks special tokens for it
            continue
        assert grammars.tokens.is_special_token(token) == (token in added)
        if token not in added:
            said = grammars.tokens.decode_bytes([token]).decode(errors="replace")
            assert said == each.decode([*probe, token])[shown:]
    compiled = compile_grammar(
        grammars,
        Grammar("json_schema", '{"type":"object","properties":{"a":{}},"required":["a"]}'),
        shape=Shape(complete=False, closed=False),
    )
    for value in ("the  capital of France", "日本語 😀 é", "\n\t1234"):
        answer = json.dumps({"a": value}, ensure_ascii=False, separators=(",", ":"))
        matcher = compiled.matcher(grammars.tokens.tokenize_str(answer))
        assert matcher.error is None
        assert matcher.is_over


LONG = ["<unk>", "<s>", "</s>", *BYTES, "a" * 10_001]

WRONG: Mapping[str, tuple[Metadata, str]] = {
    "nothing": ({}, "names no tokenizer"),
    "another kind": (byte_level(model="bert"), "names the tokenizer 'bert'"),
    "an unknown rule": (byte_level(pre="viking"), "its pre-tokenizer 'viking' is not known"),
    "no tokens": (without(byte_level(), "tokens"), "has no tokenizer.ggml.tokens"),
    "tokens that are no text": (byte_level(tokens=["a", 1]), "tokens is no list of str"),
    "a token twice": (pieces(tokens=["he"] * 266), "the token 'he' twice"),
    "too few types": (byte_level(token_type=[1]), "token_type has 1 entries for 262 tokens"),
    "a type that is none": (byte_level(token_type=[9] * 262), "token_type holds 9"),
    "no merges": (without(byte_level(), "merges"), "has no tokenizer.ggml.merges"),
    "a merge of no tokens": (byte_level(merges=["h e", "h é"]), "its merge 'h é'"),
    "no scores": (without(pieces(), "scores"), "has no tokenizer.ggml.scores"),
    "too many scores": (pieces(scores=[0.0] * 300), "scores has 300 entries for 266 tokens"),
    "scores beyond order": (pieces(scores=[float("nan")] * 266), "are not all numbers"),
    "missing bytes": (
        pieces(tokens=["<unk>", "a"], token_type=[2, 1], scores=[0.0, 0.0]),
        "lacks byte tokens, for example <0x00>",
    ),
    "tokens without end": (
        pieces(tokens=LONG, token_type=[1] * 260, scores=[0.0] * 260),
        "its tokens are too long",
    ),
    "too many tokens": (byte_level(tokens=["a"] * 1_048_577), "1,048,576 are allowed"),
    "too many merges": (byte_level(merges=["h e"] * 1_048_577), "1,048,576 are allowed"),
    "control tokens without end": (
        byte_level(tokens=["a" * 1_100_000, "b"], token_type=[3, 1], merges=[], eos_token_id=1),
        "its control and user-defined tokens are too long",
    ),
    "an id beyond": (byte_level(eos_token_id=262), "eos_token_id is 262, outside its vocab"),
    "an id below": (byte_level(bos_token_id=-1), "bos_token_id is -1"),
    "an id that is a truth": (byte_level(eos_token_id=True), "eos_token_id is of type bool"),
    "a beginning that is none": (
        without(byte_level(add_bos_token=True), "bos_token_id"),
        "add_bos_token is set, and tokenizer.ggml.bos_token_id is not",
    ),
    "a flag that is a number": (byte_level(add_eos_token=1), "add_eos_token is of type int"),
    "a template that is not there": (
        {**byte_level(), "tokenizer.chat_templates": ["rag"]},
        "name 'rag', but no template has that name",
    ),
    "half a character": (byte_level(tokens=["\ud800"], token_type=[1], merges=[]), "surrogates"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_metadata_are_refused_by_name(case: str) -> None:
    metadata, problem = WRONG[case]
    with pytest.raises(ValueError, match=problem):
        read_tokenizer(metadata)


ODD: Mapping[type, Sequence[Any]] = {
    str: ["", "\0", "a b:0", "$A", "<0xZZ>", "<0x4", "h e", "▁" * 99, "<s>", "\ud800", "qwen2"],
    int: [-1, 0, 1, 2, 3, 4, 5, 6, 9, 258, 2**63],
    float: [0.5, -0.0, 1e308, float("inf"), float("nan"), 7],
    bool: [True, False],
}
ANY: Sequence[Any] = [None, [], [[]], *(each for values in ODD.values() for each in values)]


def odd(chance: random.Random, value: Any) -> Any:
    """Return a value that a hostile file might have instead, mostly of the same type."""
    if chance.random() < 0.2:
        return chance.choice(ANY)
    if not isinstance(value, list):
        return chance.choice(ODD[type(value)])
    made = list(value)
    if chance.random() < 0.2:
        return made[: chance.randrange(len(made))]
    for _ in range(chance.choice((1, 1, 1, 50))):
        made[chance.randrange(len(made))] = odd(chance, value[0])
    return made


@pytest.mark.parametrize("make", [byte_level, pieces])
def test_whatever_metadata_say_there_is_a_tokenizer_or_a_refusal(make: Any) -> None:
    """Never another error, nor a panic of Rust code; and a tokenizer that was made can encode."""
    chance = random.Random(7)
    refused = 0
    for _ in range(300):
        metadata = make(add_bos_token=True, add_eos_token=True, unknown_token_id=0)
        metadata["tokenizer.chat_template"] = "{{ messages }}"
        for key in chance.sample(list(metadata), chance.choice((1, 1, 3))):
            metadata[key] = odd(chance, metadata[key])
        try:
            each = read_tokenizer(metadata)
            read_end_ids(metadata)
        except ValueError:
            refused += 1
        else:
            ids = each.encode("the he<s> é\n")
            assert max(ids, default=0) < len(metadata[f"{GGML}tokens"])
            each.decode(ids)
    assert 50 < refused < 250
