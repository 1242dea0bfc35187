import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from gateway.engine.embedding.tokenizer import TextTokenizer, load_text_tokenizer
from gateway.engine.models.checkpoint import Checkpoint
from gateway.errors import ModelLoadFailed
from tests.engine.embedding import harness
from tests.engine.embedding.harness import GOLDEN, TEXTS, rewrite

ARCHITECTURES = ["bert", "roberta", "xlm-roberta", "modernbert", "qwen3"]


def load(folder: Path, *, lower_case: bool = False) -> TextTokenizer:
    return load_text_tokenizer(Checkpoint("tiny", folder), lower_case=lower_case)


def tiny(path: Path, name: str, **config: Any) -> Path:
    """Copy a tiny model's tokenizer, with changes to tokenizer_config.json."""
    folder = harness.tiny(path, name)
    rewrite(folder / "tokenizer_config.json", **config)
    return folder


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cut_texts_equal_those_of_sentence_transformers(name: str) -> None:
    expected = json.loads((GOLDEN / name / "ids.json").read_text())
    limit = max(map(len, expected))
    tokenizer = load(GOLDEN / name)
    assert [tokenizer.truncate(ids, limit) for ids in tokenizer.encode(TEXTS)] == expected


def test_a_file_that_cuts_and_pads_by_itself_is_stopped(tmp_path: Path) -> None:
    """MiniLM's tokenizer.json does so at 128 tokens."""
    folder = tiny(tmp_path, "bert")
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.enable_truncation(16)
    raw.enable_padding(length=16)
    raw.save(str(folder / "tokenizer.json"))
    texts = ["a", "a " * 100]
    assert load(folder).encode(texts) == load(GOLDEN / "bert").encode(texts)


def test_a_text_within_the_limit_is_left_as_it_is() -> None:
    tokenizer = load(GOLDEN / "bert")
    [ids] = tokenizer.encode(["a a a"])
    assert tokenizer.truncate(ids, len(ids)) == ids
    assert tokenizer.truncate(ids, 1) == [ids[0], ids[-1]]


def test_a_tokenizer_that_cuts_on_the_left_keeps_the_end(tmp_path: Path) -> None:
    tokenizer = load(tiny(tmp_path, "bert", truncation_side="left"))
    [ids] = tokenizer.encode(["one two three four five"])
    assert tokenizer.truncate(ids, 5) == [ids[0], *ids[-4:]]


def test_lower_casing_is_added_only_where_asked_for() -> None:
    """do_lower_case of sentence_bert_config.json asks, whatever the tokenizer's own rules."""
    plain, lowered = load(GOLDEN / "roberta"), load(GOLDEN / "roberta", lower_case=True)
    assert plain.encode(["HELLO"]) != plain.encode(["hello"])
    assert lowered.encode(["HELLO"]) == plain.encode(["hello"])
    bert = load(GOLDEN / "bert", lower_case=True)
    assert bert.encode(TEXTS) == load(GOLDEN / "bert").encode(TEXTS)


def test_the_tokenizer_config_wins_over_berts_normalizer(tmp_path: Path) -> None:
    """transformers rebuilds BERT's normalizer from do_lower_case."""
    cased = load(tiny(tmp_path, "bert", do_lower_case=False))
    assert cased.encode(["hello"]) == load(GOLDEN / "bert").encode(["hello"])
    assert cased.encode(["HELLO"]) != cased.encode(["hello"])


def test_a_decoder_s_own_ending_is_added_once(tmp_path: Path) -> None:
    """Qwen3-Embedding's tokenizer.json ends texts itself; the config may ask for it again."""
    end = Tokenizer.from_file(str(GOLDEN / "qwen3" / "tokenizer.json")).token_to_id("<|endoftext|>")
    assert end is not None
    for folder in (
        GOLDEN / "qwen3",
        tiny(tmp_path, "qwen3", add_eos_token=True, eos_token="<|endoftext|>"),
    ):
        [ids] = load(folder).encode(["hello"])
        assert (ids[-1], ids.count(end)) == (end, 1)


@pytest.mark.parametrize("token", ["<|im_end|>", {"content": "<|im_end|>"}])
def test_an_ending_only_the_config_asks_for_is_appended(tmp_path: Path, token: Any) -> None:
    """add_eos_token with no post-processor that does it; it survives the cut."""
    folder = tiny(tmp_path, "qwen3", add_eos_token=True, eos_token=token)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": None}))
    end = Tokenizer.from_file(str(file)).token_to_id("<|im_end|>")
    tokenizer = load(folder)
    ids, empty = tokenizer.encode(["hello hello hello", ""])
    assert ids[-1] == end
    assert empty == [end]
    assert tokenizer.truncate(ids, 3) == [*ids[:2], end]


@pytest.mark.parametrize("token", [None, "<nosuch>"])
def test_an_ending_nobody_knows_is_refused(tmp_path: Path, token: str | None) -> None:
    folder = tiny(tmp_path, "qwen3", add_eos_token=True, eos_token=token)
    with pytest.raises(ModelLoadFailed, match="add_eos_token"):
        load(folder)


def test_many_threads_may_encode_at_once() -> None:
    """Encoding changes nothing, so no thread gets the error "Already borrowed"."""
    tokenizer = load(GOLDEN / "xlm-roberta")
    expected = tokenizer.encode(TEXTS)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: tokenizer.encode(TEXTS), range(64)))
    assert all(answer == expected for answer in answers)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    """Other kinds of vocabulary files are not read."""
    with pytest.raises(ModelLoadFailed, match=r"no tokenizer\.json"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadFailed, match=r"tokenizer\.json cannot be used"):
        load(tmp_path)


PIECES = (
    *(
        "a",
        "the",
        "Straße",
        "naïve",
        "e\u0301",
        "x" * 150,
        "12345",
        "3.14",
        "don't",
        "日本語",
        "ᄒ",
    ),
    *("\u200d", "👩‍👩‍👧", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\x00", "[SEP]", "</s>"),
    *("ᄒ", "<|im_end|>", "!", "--", "...", "@@", "Ａ", "ﬁ", "\u0301", "ि", "İ", "Σ", "ς"),
)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("limit", [4, 16, 60])
def test_a_text_is_cut_before_it_is_encoded_only_where_that_changes_nothing(
    name: str, limit: int
) -> None:
    """Token by token, over texts of odd pieces with many spaces, few or none between them."""
    tokenizer, chance = load(GOLDEN / name), random.Random(limit)
    texts = [
        "".join(
            chance.choice(PIECES) + " " * chance.choices((0, 1, 2, 9), weights)[0]
            for _ in range(chance.choice((30, 400)))
        )
        for weights in ((1, 5, 1, 0), (5, 1, 0, 0), (1, 0, 0, 0), (1, 1, 1, 5))
        for _ in range(12)
    ]
    texts += [*TEXTS, " " * 5000, " " * 5000 + "a b c d e " * 400, "x" * 5000, "日" * 5000, ""]
    whole, start = tokenizer.encode(texts), tokenizer.encode_start(texts, limit)
    kept = [tokenizer.truncate(ids, limit) for ids in whole]
    assert [tokenizer.truncate(ids, limit) for ids in start] == kept
    assert [len(ids) > limit for ids in start] == [len(ids) > limit for ids in whole]


def test_a_long_text_that_is_cut_costs_what_is_kept() -> None:
    tokenizer = load(GOLDEN / "bert")
    [start] = tokenizer.encode_start(["some words " * 90_000], 16)
    assert 16 < len(start) < 16 * 16


def test_what_is_cut_on_the_left_is_encoded_whole(tmp_path: Path) -> None:
    tokenizer = load(tiny(tmp_path, "bert", truncation_side="left"))
    text = "some words " * 900 + "the end"
    assert tokenizer.encode_start([text], 8) == tokenizer.encode([text])
