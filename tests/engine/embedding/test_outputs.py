import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.loading import load_embedding
from gateway.engine.device import Device
from gateway.engine.embedding import outputs
from gateway.engine.embedding.bert import arrays_of
from gateway.engine.embedding.engine import EmbeddingEngine
from gateway.engine.embedding.outputs import heads_bytes
from gateway.engine.models.checkpoint import Checkpoint
from gateway.errors import BadRequest, EngineFailed, ModelLoadFailed
from gateway.jobs.embed import Output, TextOutputs
from tests.engine.embedding.harness import GOLDEN, TEXTS, rewrite, tiny

FEW = TEXTS[:10] + TEXTS[28:31]  # as in make_outputs_golden.py
ALL: tuple[Output, ...] = ("dense", "sparse", "multi_vector")


def load(folder: Path, device: Device = Device.CPU, **settings: Any) -> EmbeddingEngine:
    return load_embedding(folder, name="tiny", device=device, **settings)


def rows_of(engine: EmbeddingEngine, texts: Sequence[str] = FEW) -> list[list[int]]:
    return [engine.truncate(ids) for ids in engine.encode(texts)]


def require_sparse(found: list[TextOutputs], folder: Path) -> None:
    expected = json.loads((folder / "sparse.json").read_text())
    assert len(found) == len(expected)
    for text, (ids, weights) in zip(found, expected, strict=True):
        assert text.sparse is not None
        assert text.sparse.ids.dtype == np.int32
        assert text.sparse.weights.dtype == np.float32
        assert text.sparse.ids.tolist() == ids
        # A sum over a text exceeds 50, where floats of 32 bits are 4e-6 apart.
        assert np.allclose(
            text.sparse.weights, weights, 0, max([1e-5, *(1e-6 * w for w in weights)])
        )


def require_vectors(found: list[TextOutputs], file: Path) -> None:
    expected = np.load(file)
    assert len(found) == len(expected)
    for text, name in zip(found, sorted(expected), strict=True):
        assert text.multi_vector is not None
        assert text.multi_vector.dtype == np.float32
        assert text.multi_vector.shape == expected[name].shape
        assert np.abs(text.multi_vector - expected[name]).max() <= 1e-5


def require_equal(one: TextOutputs, other: TextOutputs) -> None:
    pairs = [(one.dense, other.dense), (one.multi_vector, other.multi_vector)]
    if one.sparse is not None and other.sparse is not None:
        assert one.sparse.ids.tolist() == other.sparse.ids.tolist()
        assert np.allclose(one.sparse.weights, other.sparse.weights, rtol=1e-6, atol=1e-5)
    for left, right in pairs:
        assert (left is None) == (right is None)
        if left is not None and right is not None:
            assert np.allclose(left, right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", [Device.CPU, Device.METAL])
def test_bge_m3_gives_all_three_outputs_of_one_pass(device: Device) -> None:
    folder = GOLDEN / "bge-m3"
    engine = load(folder, device)
    assert engine.outputs == ALL
    assert (engine.dimensions, engine.token_dimensions) == (32, 24)
    found = engine.embed_outputs(rows_of(engine), ALL)
    dense = np.stack([text.dense for text in found if text.dense is not None])
    assert np.abs(dense - np.load(folder / "vectors.npy")).max() <= 1e-5
    require_sparse(found, folder)
    require_vectors(found, folder / "tokens.npz")


def test_only_what_is_asked_for_is_given() -> None:
    engine = load(GOLDEN / "bge-m3")
    rows = rows_of(engine)
    [text] = engine.embed_outputs(rows[:1], ["sparse"])
    assert text.dense is None
    assert text.sparse is not None
    assert text.multi_vector is None
    assert engine.embed_outputs([], ALL) == []
    assert np.allclose(engine.embed(rows), np.load(GOLDEN / "bge-m3" / "vectors.npy"), atol=1e-5)


def test_a_batch_gives_each_row_what_it_gets_alone() -> None:
    engine = load(GOLDEN / "bge-m3")
    rows = rows_of(engine, TEXTS[::2])
    for row, text in zip(rows, engine.embed_outputs(rows, ALL), strict=True):
        [alone] = engine.embed_outputs([row], ALL)
        require_equal(text, alone)


def test_a_folder_without_heads_gives_dense_vectors_alone(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "bge-m3")
    (folder / "sparse_linear.pt").unlink()
    assert load(folder).outputs == ("dense", "multi_vector")
    (folder / "colbert_linear.pt").unlink()
    engine = load(folder)
    assert engine.outputs == ("dense",)
    assert engine.token_dimensions == 0
    rows = engine.encode(["some", "texts"])
    assert engine.encode_query(["some", "texts"]) == rows
    [text, _] = engine.embed_outputs(rows, ALL)
    assert text.dense is not None
    assert text.sparse is None
    assert text.multi_vector is None


def test_heads_as_safetensors_are_read_first(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "bge-m3")
    head = {"weight": mx.zeros((1, 32)), "bias": mx.ones((1,))}
    mx.save_safetensors(str(folder / "sparse_linear.safetensors"), head)
    engine = load(folder)
    [text] = engine.embed_outputs([[0, 9, 9, 7, 2]], ALL)
    assert text.sparse is not None
    assert text.sparse.ids.tolist() == [7, 9]
    assert text.sparse.weights.tolist() == [1, 1]
    mx.save_safetensors(str(folder / "sparse_linear.safetensors"), {"weight": head["weight"]})
    with pytest.raises(ModelLoadFailed, match="weights are missing: bias"):
        load(folder)
    (folder / "sparse_linear.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ModelLoadFailed, match=r"sparse_linear\.safetensors is not a whole"):
        load(folder)


def test_a_head_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "bge-m3")
    (folder / "sparse_linear.pt").write_bytes((folder / "colbert_linear.pt").read_bytes())
    with pytest.raises(
        ModelLoadFailed, match=r"another shape.*weight is \(24, 32\), not \(1, 32\)"
    ):
        load(folder)


def test_a_head_without_outputs_is_refused(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "bge-m3")
    (folder / "colbert_linear.pt").unlink()
    empty = {"weight": mx.zeros((0, 32)), "bias": mx.zeros((0,))}
    mx.save_safetensors(str(folder / "colbert_linear.safetensors"), empty)
    with pytest.raises(ModelLoadFailed, match="safetensors has no outputs"):
        load(folder)


def test_a_sparse_head_needs_the_names_of_special_tokens(tmp_path: Path) -> None:
    """They would get weights otherwise."""
    folder = tiny(tmp_path, "bge-m3")
    config = folder / "tokenizer_config.json"
    names = {f"{role}_token": None for role in ("cls", "eos", "pad", "unk")}
    rewrite(config, **names)
    with pytest.raises(ModelLoadFailed, match="cls, eos, pad and unk"):
        load(folder)
    rewrite(config, cls_token={"content": "<s>"}, unk_token="<other>")
    with pytest.raises(ModelLoadFailed, match="cls, eos, pad and unk"):
        load(folder)


def test_an_output_that_is_not_finite_names_model_and_row(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "bge-m3")
    head = {"weight": mx.zeros((1, 32)), "bias": mx.array([np.nan])}
    mx.save_safetensors(str(folder / "sparse_linear.safetensors"), head)
    engine = load(folder)
    engine.embed_outputs([[0, 9, 2]], ["dense", "multi_vector"])
    with pytest.raises(EngineFailed, match=r"`tiny`.*row 0 is not finite"):
        engine.embed_outputs([[0, 9, 2]], ["sparse"])


def test_a_closed_engine_holds_no_memory() -> None:
    before = mx.get_active_memory()
    engine = load(GOLDEN / "bge-m3")
    engine.probe()
    assert mx.get_active_memory() - before >= engine.nbytes()
    engine.close()
    assert mx.get_active_memory() - before < 1000


def test_the_estimate_of_memory_counts_the_heads() -> None:
    """Each vector of a head is a float of 32 bits, and half as long in the file at the least."""
    engine = load(GOLDEN / "bge-m3")
    held = sum(head.nbytes for head in arrays_of(list(engine._heads.values())))
    assert held == 4 * (33 + 24 * 33)
    assert held <= heads_bytes(Checkpoint("it", GOLDEN / "bge-m3")) <= 5 * held
    assert heads_bytes(Checkpoint("it", GOLDEN / "bert")) == 0


SPLADES = ["splade-bert", "splade-xlm-roberta", "splade-modernbert"]


@pytest.mark.parametrize("device", [Device.CPU, Device.METAL])
@pytest.mark.parametrize("name", SPLADES)
def test_splade_gives_the_weights_of_sentence_transformers(name: str, device: Device) -> None:
    engine = load(GOLDEN / name, device)
    assert engine.outputs == ("sparse",)
    assert (engine.dimensions, engine.token_dimensions) == (0, 0)
    require_sparse(engine.embed_outputs(rows_of(engine), ["sparse"]), GOLDEN / name)


@pytest.mark.parametrize("name", SPLADES)
def test_logits_computed_in_slices_give_the_same_weights(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "SLICE_LOGITS", 1000)  # some three tokens of a row
    engine = load(GOLDEN / name)
    require_sparse(engine.embed_outputs(rows_of(engine), ["sparse"]), GOLDEN / name)
    for row in rows_of(engine)[:4]:
        [alone] = engine.embed_outputs([row], ["sparse"])
        [_, beside] = engine.embed_outputs([[2] * 30, row], ["sparse"])
        require_equal(alone, beside)


def test_splade_has_no_dense_vector() -> None:
    engine = load(GOLDEN / "splade-bert")
    with pytest.raises(BadRequest, match="`tiny` gives no dense vectors: its output is sparse"):
        engine.embed([[2, 9, 3]])
    assert engine.nbytes() >= (GOLDEN / "splade-bert" / "model.safetensors").stat().st_size * 0.9
    engine.probe()


def test_a_folder_of_a_masked_model_alone_is_splade_if_models_yaml_says_so(tmp_path: Path) -> None:
    """As sentence-transformers' SparseEncoder takes naver's first folders: the largest weight."""
    folder = tiny(tmp_path, "splade-bert")
    for name in ("modules.json", "config_sentence_transformers.json"):
        (folder / name).unlink()
    with pytest.raises(ModelLoadFailed, match=r"set `pooling:` \(mean, cls, last or splade\)"):
        load(folder)
    engine = load(folder, pooling="splade")
    require_sparse(engine.embed_outputs(rows_of(engine), ["sparse"]), GOLDEN / "splade-bert")


@pytest.mark.parametrize(
    ("file", "changes", "reason"),
    [
        ("1_SpladePooling/config.json", {"pooling_strategy": "mean"}, "pooling_strategy 'mean'"),
        ("1_SpladePooling/config.json", {"activation_function": "x"}, "activation_function 'x'"),
        ("sentence_bert_config.json", {"transformer_task": "retrieval"}, "transformer_task"),
        ("config.json", {"hidden_act": "x"}, "hidden_act `x`"),
        ("config.json", {"tie_word_embeddings": False}, "missing: cls.predictions.decoder.weight"),
    ],
)
def test_a_splade_that_would_be_computed_wrongly_is_refused(
    tmp_path: Path, file: str, changes: dict[str, Any], reason: str
) -> None:
    folder = tiny(tmp_path, "splade-bert")
    rewrite(folder / file, **changes)
    with pytest.raises(ModelLoadFailed, match=reason):
        load(folder)


def test_splade_on_an_encoder_without_such_a_head_is_refused(tmp_path: Path) -> None:
    for name, architecture in (("nomic-bert", "nomic_bert"), ("qwen3", "qwen3")):
        folder = tiny(tmp_path, name)
        (folder / "modules.json").unlink()
        (folder / "sentence_bert_config.json").unlink()
        with pytest.raises(ModelLoadFailed, match=f"SPLADE of the architecture `{architecture}`"):
            load(folder, pooling="splade")
    folder = tiny(tmp_path, "bert")
    (folder / "modules.json").unlink()
    (folder / "sentence_bert_config.json").unlink()
    with pytest.raises(ModelLoadFailed, match=r"weights are missing: cls\.predictions"):
        load(folder, pooling="splade")
