import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_lm.models import gemma3_text
from mlx_lm.utils import _get_classes, load_model

from benchmarks.loading import load_embedding
from gateway.engine.device import Device
from gateway.engine.embedding.decoder import BothWays, Decoder
from gateway.engine.embedding.engine import EmbeddingEngine
from gateway.errors import ModelLoadFailed
from tests.engine.embedding.harness import GOLDEN, TEXTS, read_weights, rewrite, tiny, write_weights

QWEN3 = GOLDEN / "qwen3"


def load(folder: Path, device: Device = Device.CPU) -> EmbeddingEngine:
    return load_embedding(folder, name="tiny", device=device)


def save_whole(folder: Path, **more: mx.array) -> None:
    """Save the bare model's weights again under the names a whole model has."""
    write_weights(folder, {f"model.{n}": a for n, a in read_weights(folder).items()} | more)


def test_a_decoder_that_looks_ahead_gets_the_vectors_of_sentence_transformers(
    tmp_path: Path,
) -> None:
    folder = tiny(tmp_path, "qwen3")
    rewrite(folder / "config.json", is_causal=False)
    engine = load(folder)
    rows = [engine.truncate(ids) for ids in engine.encode(TEXTS)]
    expected = np.load(QWEN3 / "vectors-both-ways.npy")
    assert np.abs(engine.embed(rows) - expected).max() <= 5e-6
    assert np.abs(expected - np.load(QWEN3 / "vectors.npy")).max() > 0.1


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
def test_the_first_token_sees_the_last_only_where_tokens_look_ahead(
    tmp_path: Path, kind: str
) -> None:
    """Those whose mlx-lm class must take the mask, and have no vectors here to compare with."""
    folder = tiny(tmp_path, "qwen3")
    config = {**json.loads((folder / "config.json").read_text()), "model_type": kind}
    whole, arguments = _get_classes(config)
    named: Any = tree_flatten(whole(arguments.from_dict(config)).parameters())
    write_weights(folder, {n.removeprefix("model."): a for n, a in named})
    for is_causal in (True, False):
        rewrite(folder / "config.json", model_type=kind, is_causal=is_causal, architectures=None)
        engine = load_embedding(folder, name="tiny", device=Device.CPU, pooling="cls")
        one, other = engine.embed([[5, 6, 7], [5, 6, 8, 9]])
        assert np.array_equal(one, other) == is_causal


def test_a_token_sees_half_a_window_to_either_side_but_no_padding() -> None:
    """Padding out of reach of any token sees itself: a row that sees nothing would be NaN."""
    mask = mx.arange(9)[None] < mx.array([[9], [3]])
    seen = BothWays(mask).make_mask(9, window_size=4)
    assert seen is not None
    whole, short = np.array(seen)[:, 0]
    far = np.abs(np.arange(9)[:, None] - np.arange(9))
    assert np.array_equal(whole, far <= 2)
    assert np.array_equal(short, ((far <= 2) & (np.arange(9) < 3)) | (far == 0))
    assert BothWays(None).make_mask(3, window_size=4) is None
    everything = BothWays(mask).make_mask(9)
    assert everything is not None
    assert np.array_equal(np.array(everything)[:, 0, 0], np.array(mask))


UNNAMED: dict[str, Any] = {"architectures": None}
# Windows begin at a layer, in transformers at the 29th.
SLIDING: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ({"bidirectional": True}, "bidirectional True"),
        ({"is_causal": False, "model_type": "olmo2", **UNNAMED}, "is_causal False.*`olmo2`"),
        ({"is_causal": False, "sliding_window": 8, **SLIDING}, "sliding windows"),
        (
            {"is_causal": False, "sliding_window": 8, "model_type": "mistral", **UNNAMED},
            "sliding windows",
        ),
        ({"is_causal": False, "layer_types": 3}, "config.json has an invalid value"),
        ({"hidden_act": "mish"}, "hidden_act `mish`"),
        ({"num_hidden_layers": 10_000_000}, "num_hidden_layers"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ({"max_position_embeddings": float("inf")}, "inf"),
    ],
)
def test_a_decoder_whose_vectors_would_be_wrong_is_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    """mlx_lm's classes are causal, and would give plausible wrong vectors."""
    folder = tiny(tmp_path, "qwen3")
    rewrite(folder / "config.json", **changes)
    with pytest.raises(ModelLoadFailed, match=named):
        load(folder)


REMOTE = {"AutoModel": "modeling_lfm2_bidirectional.Lfm2BidirectionalModel"}
VISION: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "vocab_size": None,
    "text_config": {"vocab_size": 320},
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        # jina-embeddings-v5, of its own name, with adapters, and as a Qwen3 with adapters
        ({"model_type": "jina_embeddings_v5"}, "`jina_embeddings_v5`, is not supported"),
        ({"architectures": ["JinaEmbeddingsV5Model"]}, "JinaEmbeddingsV5Model, is not .* `qwen3`"),
        ({"task_names": ["retrieval", "clustering"]}, "with adapters for clustering, retrieval"),
        # Nemotron-3-Embed, and its older name
        (
            {"model_type": "ministral3", "architectures": ["Ministral3Model"], "is_causal": False},
            "is_causal False is not supported for `ministral3`",
        ),
        ({"model_type": "ministral3_bidirec"}, "`ministral3_bidirec`, is not supported"),
        # LFM2.5-Embedding, whose model_type is a causal model's
        (
            {"model_type": "lfm2", "architectures": ["Lfm2BidirectionalModel"]},
            "Lfm2BidirectionalModel, is not served as a `lfm2`",
        ),
        (
            {"model_type": "lfm2", "architectures": None, "auto_map": REMOTE},
            "Lfm2BidirectionalModel, is not served as a `lfm2`",
        ),
        ({"model_type": "lfm2_bidirectional"}, "`lfm2_bidirectional`, is not supported"),
        # Qwen3-VL-Embedding
        (
            {**VISION, "architectures": ["Qwen3VLModel"]},
            "its architecture, Qwen3VLModel, is not served as a `qwen3_vl`",
        ),
        (
            {**VISION, "architectures": ["Qwen3VLForConditionalGeneration"]},
            "its architecture, Qwen3VLForConditionalGeneration, is not served",
        ),
        ({"architectures": ["LlamaBidirectionalModel"], "model_type": "llama"}, "LlamaBidirect"),
        ({"architectures": 3}, "config.json has an invalid value"),
        ({"auto_map": ["x"]}, "config.json has an invalid value"),
    ],
)
def test_a_model_that_is_more_than_its_decoder_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    """Its vectors would be plausible and wrong."""
    folder = tiny(tmp_path, "qwen3")
    rewrite(folder / "config.json", **changes)
    with pytest.raises(ModelLoadFailed, match=named):
        load(folder)


def test_a_plain_decoder_is_served_by_any_name_of_its_own(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "qwen3")
    for names in (["Qwen3ForCausalLM"], ["Qwen3Model"], None, ["OtherForCausalLM"]):
        remote = {"AutoModel": "modeling_qwen.Qwen3Model"}
        rewrite(folder / "config.json", architectures=names, auto_map=remote)
        assert load(folder).dimensions == 32


def test_texts_end_at_a_window_that_mlx_lms_class_ignores(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "qwen3")
    rewrite(folder / "config.json", sliding_window=8, **SLIDING)
    assert load(folder).max_tokens == 8
    rewrite(folder / "config.json", max_window_layers=28)  # its layers are fewer
    assert load(folder).max_tokens == 96


@pytest.mark.parametrize("types", [["full_attention", "sliding_attention"], ["sliding_attention"]])
def test_layers_that_gemmas_class_has_no_key_for_are_refused(
    tmp_path: Path, types: list[str]
) -> None:
    folder = tiny(tmp_path, "embeddinggemma")
    rewrite(folder / "config.json", layer_types=types)
    with pytest.raises(ModelLoadFailed, match="full"):
        load(folder)


def packed_by_mlx_embeddings(folder: Path) -> None:
    """Write a checkpoint as mlx-embeddings 0.1 does: quantized, linear layers in the same file."""
    weights = {f"model.{name}": array for name, array in read_weights(folder).items()}
    for index, part in enumerate(("2_Dense", "3_Dense")):
        weights[f"dense.{index}.weight"] = read_weights(folder / part)["linear.weight"]
        shutil.rmtree(folder / part)
    for name in [name for name, array in weights.items() if array.ndim == 2]:
        codes, scales, biases = mx.quantize(weights[name], group_size=32, bits=8)
        module = name.removesuffix(".weight")
        weights |= {name: codes, f"{module}.scales": scales, f"{module}.biases": biases}
    write_weights(folder, weights)
    rewrite(folder / "config.json", quantization={"group_size": 32, "bits": 8})


@pytest.mark.parametrize("has_listing", [True, False])
def test_an_embeddinggemma_of_mlx_embeddings_is_read(tmp_path: Path, has_listing: bool) -> None:
    folder = tiny(tmp_path, "embeddinggemma")
    last = folder / "3_Dense"
    identity = "torch.nn.modules.linear.Identity"
    rewrite(last / "config.json", bias=False, activation_function=identity)
    write_weights(last, {"linear.weight": read_weights(last)["linear.weight"]})
    rows = [[2, *range(5, 40), 1], [2, 8, 1]]
    plain = load(folder)
    expected = plain.embed(rows)
    packed_by_mlx_embeddings(folder)
    settings: dict[str, Any] = {}
    if not has_listing:
        (folder / "modules.json").unlink()
        settings = {"pooling": "mean", "normalize": True}
    for device in (Device.CPU, Device.METAL):
        engine = load_embedding(folder, name="tiny", device=device, **settings)
        assert engine.dimensions == 24
        assert (engine.embed(rows) * expected).sum(1).min() > 0.999
    assert engine.nbytes() < plain.nbytes() / 2


def test_a_decoder_with_code_of_its_own_is_refused(tmp_path: Path) -> None:
    """A model's own Python is never run."""
    folder = tiny(tmp_path, "qwen3")
    rewrite(folder / "config.json", model_file="evil.py")
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelLoadFailed, match=r"evil\.py"):
        load(folder)


def test_a_decoder_saved_whole_gives_the_same_vectors(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "qwen3")
    save_whole(folder, **{"lm_head.weight": mx.zeros((320, 32))})
    for tied in (True, False):
        rewrite(folder / "config.json", tie_word_embeddings=tied)
        engine = load(folder)
        assert np.array_equal(engine.embed([[5, 6, 7]]), load(QWEN3).embed([[5, 6, 7]]))
        assert engine.nbytes() == load(QWEN3).nbytes()


def test_a_quantized_decoder_is_float32_on_the_cpu(tmp_path: Path) -> None:
    """Quantized products are the slowest of all there; the vectors stay close."""
    folder = tiny(tmp_path, "qwen3")
    save_whole(folder)
    model, _ = load_model(folder)
    quantize(model, group_size=32, bits=8)
    packed = dict(tree_flatten(model.parameters()))
    write_weights(folder, packed)
    rewrite(folder / "config.json", quantization={"group_size": 32, "bits": 8})
    engine = load(folder)
    assert engine.nbytes() == load(QWEN3).nbytes()
    cosine = engine.embed([[5, 6, 7]]) @ load(QWEN3).embed([[5, 6, 7]]).T
    assert cosine.item() > 0.999
    kept = load(folder, Device.METAL)
    assert kept.nbytes() < engine.nbytes() / 2
    assert kept.token_s > 0, "packed numbers count as numbers"
    assert np.abs(kept.embed([[5, 6, 7]]) - engine.embed([[5, 6, 7]])).max() < 1e-3


def test_a_gemma3_saved_without_its_head_is_loaded(tmp_path: Path) -> None:
    """mlx-lm's own class drops the head that it has made, and must find it."""
    folder = tiny(tmp_path, "qwen3")
    config = {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3TextModel"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "sliding_window_pattern": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "max_position_embeddings": 512,
    }
    rewrite(folder / "config.json", **config)
    classes: Any = gemma3_text
    model = classes.Model(classes.ModelArgs.from_dict(config))
    named: Any = tree_flatten(model.parameters())
    bare = {n.removeprefix("model."): a for n, a in named if not n.startswith("lm_head")}
    write_weights(folder, bare)
    vectors = load(folder).embed([[5, 6, 7], [8, 9]])
    assert vectors.shape == (2, 32)
    assert np.isfinite(vectors).all()


@pytest.mark.parametrize("name", ["qwen3", "eurobert", "embeddinggemma"])
def test_layers_taken_out_of_a_forward_give_its_bits(name: str) -> None:
    engine = load(GOLDEN / name)
    rows = [engine.truncate(ids) for ids in engine.encode(TEXTS[:6])]
    by_layer = engine.embed(rows)
    encoder: Any = engine._encoder
    assert encoder._is_chain
    encoder._is_chain = False
    assert np.array_equal(by_layer, engine.embed(rows))


class _States(Module):
    """A decoder of two linear layers, which does something else between or beside them."""

    def __init__(self, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind = kind
        self.layers = [Linear(4, 4), Linear(4, 4)]

    def __call__(self, tokens: mx.array) -> mx.array:
        state = mx.zeros((*tokens.shape, 4))
        if self.kind == "skips":
            return self.layers[1](state)
        if self.kind == "unpacks":
            state, _ = self.layers[0](state)
        for layer in self.layers:
            state = layer(state)
            if self.kind == "doubles":
                state = state * 2
        return state


class _Lent(Module):
    """A decoder whose layers are another module's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = _States("plain")

    @property
    def layers(self) -> list[Any]:
        return self.inner.layers

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.inner(tokens)


@pytest.mark.parametrize(
    ("kind", "is_chain"),
    [("plain", True), ("doubles", False), ("skips", False), ("unpacks", False), ("lends", False)],
)
def test_a_forward_that_is_no_chain_of_layers_runs_whole(kind: str, is_chain: bool) -> None:
    decoder: Any = object.__new__(Decoder)
    decoder._states, decoder._looks_ahead, decoder._rounding = _States(kind), False, None
    states = _Lent() if kind == "lends" else decoder._states
    decoder._states, keys, layers = states, [*states], states.layers
    assert decoder._calls_in_a_chain() == is_chain
    assert states.layers is layers
    assert [*states] == keys
