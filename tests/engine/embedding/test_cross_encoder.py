import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.loading import load_cross_encoder
from gateway.engine.device import Device
from gateway.engine.embedding.cross_encoder import CrossEncoderEngine
from gateway.engine.embedding.tokenizer import load_text_tokenizer, read_pair_template
from gateway.engine.models.checkpoint import Checkpoint
from gateway.errors import ContextLengthExceeded, EngineFailed, ModelLoadFailed
from gateway.jobs.rerank import Pair
from tests.engine.embedding import harness
from tests.engine.embedding.harness import GOLDEN, read_weights, rewrite, write_weights

PAIRS: list[tuple[str, str]] = json.loads((GOLDEN / "pairs.json").read_text())
KINDS = ("bert", "xlm-roberta", "modernbert-cls", "modernbert-mean")
TINY = [f"{kind}-reranker" for kind in KINDS]
_engines: dict[tuple[str, Device], CrossEncoderEngine] = {}


def load(folder: Path, device: Device = Device.CPU, **settings: Any) -> CrossEncoderEngine:
    return load_cross_encoder(folder, name="tiny", device=device, **settings)


def golden(name: str, device: Device = Device.CPU) -> CrossEncoderEngine:
    if (name, device) not in _engines:
        _engines[name, device] = load(GOLDEN / name, device)
    return _engines[name, device]


def rows(engine: CrossEncoderEngine) -> list[Pair]:
    return [engine.encode_pairs(query, [document])[0] for query, document in PAIRS]


def tiny(path: Path, name: str = "bert-reranker") -> Path:
    return harness.tiny(path, name)


@pytest.mark.parametrize(
    ("name", "device"),
    [*((name, Device.CPU) for name in TINY), *((name, Device.METAL) for name in TINY[::2])],
)
def test_every_pair_gets_the_score_of_sentence_transformers(name: str, device: Device) -> None:
    engine = golden(name, device)
    step = 1 if device is Device.CPU else 4
    pairs = rows(engine)[::step]
    expected = np.load(GOLDEN / name / "scores.npy")[::step]
    together = engine.score(pairs)
    assert together.dtype == np.float32
    assert together.shape == (64 // step, engine.labels) == expected.shape
    assert np.abs(together - expected).max() <= 1e-5
    alone = np.concatenate([engine.score([pair]) for pair in pairs])
    assert np.abs(alone - expected).max() <= 1e-5
    assert expected.std() > 0.5  # else any score would do


@pytest.mark.parametrize("name", TINY)
def test_a_pair_in_steps_gets_the_same_bits(name: str) -> None:
    engine = golden(name, Device.CPU)
    pair = max(rows(engine), key=len)
    *steps, score = engine.in_steps([pair])
    assert steps == [None] * len(steps)
    assert len(steps) > 1
    assert score is not None
    assert np.array_equal(score, engine.score([pair]))


@pytest.mark.parametrize("name", TINY)
def test_pairs_are_joined_and_cut_as_transformers_does(name: str) -> None:
    saved = json.loads((GOLDEN / name / "pairs.json").read_text())
    pairs = rows(golden(name))
    assert [list(pair.ids) for pair in pairs] == [each["ids"] for each in saved]
    lead = golden(name)._template.lead
    types = [len(pair) if lead is None else pair.second - lead for pair in pairs]
    assert types == [each["second"] for each in saved]
    lengths = [len(pair.ids) for pair in pairs]
    assert max(lengths) == golden(name).max_tokens
    cut = [pair.cut > 0 for pair in pairs]
    assert {length for length, is_cut in zip(lengths, cut, strict=True) if is_cut} == {max(lengths)}


@pytest.mark.parametrize("name", TINY)
def test_a_document_is_cut_to_its_own_limit(name: str) -> None:
    engine = golden(name)
    [whole] = engine.encode_pairs("hello", ["one two three four"])
    [cut] = engine.encode_pairs("hello", ["one two three four"], max_document_tokens=3)
    [empty] = engine.encode_pairs("hello", [""])
    assert (whole.cut, cut.cut, empty.cut) == (0, len(whole) - len(cut), 0)
    assert len(cut.ids) == len(empty.ids) + 3
    end = engine._template.after
    assert [*cut.ids] == [*whole.ids[: len(cut.ids) - len(end)], *end]
    [same] = engine.encode_pairs("hello", ["one two three four"], max_document_tokens=999)
    assert same == whole


def test_a_query_is_never_cut() -> None:
    engine = load(GOLDEN / "bert-reranker", max_context=16)
    query = "abcdefghijkl"
    [ids] = engine.tokenizer.encode([query], with_specials=False)
    for limit in range(16, len(ids) + 3, -1):
        engine = load(GOLDEN / "bert-reranker", max_context=limit)
        [pair] = engine.encode_pairs(query, ["one two three four five"])
        assert list(pair.ids[1 : len(ids) + 1]) == ids
        assert len(pair.ids) == limit
        assert pair.cut


def test_a_query_without_room_for_a_document_is_refused() -> None:
    [ids] = golden("bert-reranker").tokenizer.encode(["abcdefghijkl"], with_specials=False)
    engine = load(GOLDEN / "bert-reranker", max_context=len(ids) + 3)
    with pytest.raises(ContextLengthExceeded, match="your query") as caught:
        engine.encode_pairs("abcdefghijkl", ["a"])
    assert caught.value.tokens == len(ids) + 4


def test_a_tokenizer_that_cuts_on_the_left_keeps_a_document_s_end(tmp_path: Path) -> None:
    """The model's truncation_side decides, as it does in transformers."""
    folder = tiny(tmp_path)
    rewrite(folder / "tokenizer_config.json", truncation_side="left")
    [whole] = load(folder).encode_pairs("hello", ["one two three four"])
    [cut] = load(folder).encode_pairs("hello", ["one two three four"], max_document_tokens=3)
    assert cut.ids[-4:] == whole.ids[-4:]


def test_types_are_left_out_where_the_model_is_not_given_them(tmp_path: Path) -> None:
    folder = tiny(tmp_path)
    rewrite(folder / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])
    [pair] = load(folder).encode_pairs("hello", ["one two three"])
    untyped = golden("bert-reranker").score([Pair(pair.ids, len(pair))])
    assert np.array_equal(load(folder).score([pair]), untyped)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("[CLS] $B [SEP] $A:1 [SEP]:1", "order"),
        ("[CLS] $A [SEP] $B:2 [SEP]:2", "types"),
        ("[CLS]:1 $A [SEP] $B:1 [SEP]:1", "types"),
        ("[CLS]:1 $A:1 [SEP]:1 $B:1 [SEP]:1", "types"),
    ],
)
def test_a_template_that_is_not_understood_is_refused(
    tmp_path: Path, pair: str, message: str
) -> None:
    """Rather than joined wrongly."""
    folder = tiny(tmp_path)
    file = folder / "tokenizer.json"
    raw = json.loads(file.read_text())
    parts = [part.partition(":") for part in pair.split()]
    raw["post_processor"]["pair"] = [
        {"Sequence": {"id": name[1:], "type_id": int(kind or 0)}}
        if name.startswith("$")
        else {"SpecialToken": {"id": name, "type_id": int(kind or 0)}}
        for name, _, kind in parts
    ]
    file.write_text(json.dumps(raw))
    checkpoint = Checkpoint("tiny", folder)
    tokenizer = load_text_tokenizer(checkpoint, lower_case=False)
    with pytest.raises(ModelLoadFailed, match=message):
        read_pair_template(checkpoint, tokenizer)


def test_half_precision_scores_are_close_and_finite() -> None:
    """They are finite for a window of nothing but padding, too."""
    for name in TINY:
        engine = load(GOLDEN / name, Device.METAL, dtype="float16")
        scores = engine.score(rows(engine)[:8])
        assert np.abs(scores - np.load(GOLDEN / name / "scores.npy")[:8]).max() <= 0.02


def test_a_plain_folder_of_transformers_is_read_alike(tmp_path: Path) -> None:
    """Most rerankers on the hub have no modules.json."""
    folder = tiny(tmp_path)
    for file in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        (folder / file).unlink()
    engine = load(folder)
    assert np.array_equal(engine.score(rows(engine)), golden("bert-reranker").score(rows(engine)))


def test_a_folder_with_more_modules_is_refused(tmp_path: Path) -> None:
    """A pooling module means an embedding model; a listing that is none is named."""
    folder = tiny(tmp_path)
    shutil.copy(GOLDEN / "bert" / "modules.json", folder)
    with pytest.raises(ModelLoadFailed, match="Pooling"):
        load(folder)
    (folder / "modules.json").write_text("[3]")
    with pytest.raises(ModelLoadFailed, match=r"modules\.json"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bert-reranker", {"model_type": "qwen3"}, "not supported for reranking"),
        ("bert-reranker", {"architectures": ["BertForTokenClassification"]}, "TokenClass"),
        ("bert-reranker", {"architectures": 2}, r"config\.json has an invalid value"),
        ("bert-reranker", {"model_type": ["bert"]}, r"config\.json has an invalid value"),
        ("modernbert-cls-reranker", {"classifier_pooling": "max"}, "classifier_pooling"),
        ("modernbert-cls-reranker", {"classifier_activation": "mish"}, "classifier_activation"),
        ("modernbert-cls-reranker", {"classifier_bias": True}, r"head\.dense\.bias"),
    ],
)
def test_a_head_that_cannot_be_computed_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    folder = tiny(tmp_path, name)
    rewrite(folder / "config.json", **changes)
    with pytest.raises(ModelLoadFailed, match=message):
        load(folder)


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    """An embedding model's weights lack it, and noise would rank the documents."""
    folder = tiny(tmp_path, "xlm-roberta")
    (folder / "modules.json").unlink()
    (folder / "sentence_bert_config.json").unlink()
    rewrite(folder / "config.json", architectures=None)
    with pytest.raises(ModelLoadFailed, match=r"missing: classifier\.dense\.bias"):
        load(folder)


def test_a_bias_of_the_head_is_added(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "modernbert-cls-reranker")
    rewrite(folder / "config.json", classifier_bias=True)
    write_weights(folder, read_weights(folder) | {"head.dense.bias": mx.ones(32)})
    [pair] = load(folder).encode_pairs("hello", ["one two three"])
    plain = golden("modernbert-cls-reranker").score([pair])
    assert np.abs(load(folder).score([pair]) - plain).max() > 1e-3


@pytest.mark.parametrize("name", TINY)
def test_a_score_that_is_not_finite_names_model_and_row(tmp_path: Path, name: str) -> None:
    """One broken weight vector spoils only the pairs that hold its token."""
    folder = tiny(tmp_path, name)
    weights = read_weights(folder)
    ends = ("word_embeddings.weight", "tok_embeddings.weight")
    [words] = [name for name in weights if name.endswith(ends)]
    table = np.array(weights[words])
    table[9] = np.nan
    write_weights(folder, weights | {words: mx.array(table)})
    engine = load(folder)
    with pytest.raises(EngineFailed, match=r"`tiny`.*score of row 1 "):
        engine.score([Pair([2, 8, 3], 3), Pair([2, 9, 3, 3], 4), Pair([2, 3], 2)])
