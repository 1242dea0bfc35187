"""Parts of a model's files that change answers are read, refused or named, and no others are."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from benchmarks import tiny_models
from gateway.engine.device import Device
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.configs import classes_of
from gateway.engine.models.corrections import correct
from gateway.engine.models.counts import text_config
from gateway.engine.models.decoders import open_decoder
from gateway.engine.models.family_defaults import is_default, resolve
from gateway.engine.models.notes import list_notes, verified_by
from gateway.engine.models.unread import list_dropped, read_names
from gateway.errors import ModelLoadFailed
from tests.golden_decoders import write_decoder

LINEAR = {"rope_type": "linear", "factor": 4.0}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64, **LONG}
LOCAL = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {**LINEAR, "rope_theta": 1e4}}


def built(config: Mapping[str, Any]) -> Any:
    written = deepcopy(dict(config))
    model_class, arguments = classes_of(written)
    model = model_class(arguments.from_dict(written))
    correct(model, text_config(written), {}, None)
    return model


def changed(family: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    config = tiny_models.tiny_config(family)
    text = config.get("text_config") or config
    if "rope_parameters" in changes:
        for key in ("rope_theta", "rope_scaling", "rope_local_base_freq"):
            text.pop(key, None)
    text.update(changes)
    return config


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("deepseek_v2", {"rope_scaling": {**LINEAR, "type": "linear"}}, "rope_type linear"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave False"),
        ("falcon_h1", {"attention_in_multiplier": 1.2}, "attention_in_multiplier 1.2"),
        ("falcon_h1", {"time_step_limit": [0.3, 0.6]}, "time_step_limit"),
        ("gemma3_text", {"final_logit_softcapping": 5.0}, "final_logit_softcapping 5.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"rope_parameters": LOCAL}, "rope_parameters of sliding_attention"),
        ("gemma4_text", {"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ("glm", {"rope_scaling": {**LONGROPE, "type": "longrope"}}, "rope_type longrope"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights False"),
        ("gpt_oss", {"swiglu_alpha": 2.0}, "swiglu_alpha 2.0"),
        ("gpt_oss", {"swiglu_limit": 3.0}, "swiglu_limit 3.0"),
        ("granitemoehybrid", {"mamba_n_groups": 2}, "mamba_n_groups 2"),
        ("llama", {"hidden_act": "tanh"}, "hidden_act `tanh`"),
        ("llama4_text", {"no_rope_layer_interval": 2}, "no_rope_layer_interval 2"),
        ("mamba", {"layer_norm_epsilon": 0.05}, "layer_norm_epsilon 0.05"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu'"),
        ("olmoe", {"clip_qkv": 0.5}, "clip_qkv 0.5"),
        ("phi", {"hidden_act": "silu"}, "hidden_act `silu`"),
        ("gpt_bigcode", {"multi_query": False}, "multi_query False"),
        ("jamba", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("kimi_linear", {"rms_norm_eps": 0.05}, "rms_norm_eps 0.05"),
        ("kimi_linear", {"tie_word_embeddings": True}, "tie_word_embeddings True"),
        ("mamba2", {"n_groups": 2}, "n_groups 2"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob True"),
    ],
)
def test_a_key_that_a_class_passes_over_is_refused_by_name(
    family: str, changes: dict[str, Any], named: str
) -> None:
    built(tiny_models.tiny_config(family))  # served with another value
    with pytest.raises(ValueError, match=named) as refused:
        built(changed(family, changes))
    assert family in str(refused.value) or "sliding_attention" in named


@pytest.mark.parametrize("key", ["no_such_key", "torch_dtype", "id2label", "_name_or_path"])
def test_a_key_that_transformers_does_not_read_is_not_named(key: str) -> None:
    assert list_notes(changed("llama", {key: "some value"}), None) == []


def test_a_key_that_only_transformers_reads_is_named() -> None:
    notes = list_notes(changed("gpt2", {"reorder_and_upcast_attn": True}), None)
    assert notes == ["nothing reads `reorder_and_upcast_attn` of config.json"]


# Rows whose context is lower than the one their config states: they have true windows.
WINDOWED = {"gemma2", "llama4_text", "ministral3"}


@pytest.mark.slow  # it makes a model of each architecture
def test_no_architecture_of_the_table_gets_a_false_note_or_refusal() -> None:
    noted = {}
    for family in tiny_models.names():
        if family in ("olmo", "prism_hadamard_qwen35"):  # docs/architectures.md says why
            continue
        config = tiny_models.tiny_config(family)
        built(config)
        notes = list_notes(deepcopy(config), None)
        if notes:
            noted[family] = notes
    assert noted.keys() == WINDOWED
    assert all("beyond" in note for notes in noted.values() for note in notes), noted


class Dropping:
    """A model that drops all arrays whose names have a part in them."""

    def __init__(self, part: str) -> None:
        self._part = part

    def sanitize(self, found: dict[str, mx.array]) -> dict[str, mx.array]:
        return {name: array for name, array in found.items() if self._part not in name}


FILES = {f"model.layers.{at}.mlp.up_proj.weight": mx.zeros((8, 4)) for at in range(4)}


@pytest.mark.parametrize(
    ("dropped", "kinds"),
    [
        ("model.layers.1.mlp.gate.scale", ["model.layers.*.mlp.gate.scale"]),
        ("model.norm.bias", ["model.norm.bias"]),
        ("model.visual.blocks.0.norm.weight", []),
        ("model.vision_tower.norm.weight", []),
        ("audio_tower.layers.0.norm.weight", []),
        ("multi_modal_projector.linear.weight", []),
        ("mtp.layers.0.input_proj.weight", []),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", []),
        ("model.layers.4.eh_proj.weight", []),  # a layer beyond the last, for reading ahead
        ("lm_head.weight", []),  # tied
    ],
)
def test_an_array_that_a_class_drops_is_named_and_a_spare_one_is_not(
    dropped: str, kinds: list[str]
) -> None:
    files = {**FILES, dropped: mx.zeros((3, 5))}
    assert list_dropped(files, Dropping(dropped), {"num_hidden_layers": 4}) == kinds
    assert list_dropped(FILES, Dropping(dropped), {"num_hidden_layers": 4}) == []


@pytest.mark.parametrize(
    "bias",
    [
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.1.mlp.moe_statics.e_score_correction_bias",
        "model.layers.1.feed_forward.expert_bias",
    ],
)
def test_a_bias_of_the_experts_choice_that_a_class_drops_is_refused(bias: str) -> None:
    files = {**FILES, bias: mx.zeros(8)}
    with pytest.raises(ValueError, match="bias are not supported"):
        list_dropped(files, Dropping("bias"), {"num_hidden_layers": 4})


def test_arrays_under_other_names_and_stacked_are_not_dropped() -> None:
    class Stacking:
        def sanitize(self, found: dict[str, mx.array]) -> dict[str, mx.array]:
            return {"model.up": mx.stack([found[name] for name in sorted(found)])}

    assert list_dropped(FILES, Stacking(), {"num_hidden_layers": 4}) == []


def test_a_dropped_array_is_named_when_a_checkpoint_is_opened(tmp_path: Path) -> None:
    write_decoder("llama gelu", tmp_path)
    file = str(tmp_path / "model.safetensors")
    held: Any = mx.load(file)
    mx.save_safetensors(file, {**held, "model.layers.0.self_attn.rotary_emb.inv_freq": mx.zeros(8)})
    notes: list[str] = []
    opened = Checkpoint("mine", tmp_path)
    open_decoder(opened, device=Device.CPU, dtype=None, note=notes.append)
    assert notes == []
    mx.save_safetensors(file, {**held, "model.odd": mx.zeros(8)})
    with pytest.raises(ModelLoadFailed, match=r"model\.odd"):
        open_decoder(opened, device=Device.CPU, dtype=None, note=notes.append)


def test_defaults_are_those_of_transformers() -> None:
    assert is_default({"model_type": "llama", "hidden_act": "silu"}, "hidden_act")
    assert not is_default({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act")
    assert is_default({"model_type": "unheard of", "hidden_act": "gelu"}, "hidden_act")
    assert resolve({"model_type": "unheard of"}) == ({}, {})
    aliases, whole = resolve({"model_type": "gpt2", "n_embd": 64})
    assert (aliases["hidden_size"], whole["n_embd"]) == ("n_embd", 64)


def test_a_name_is_read_where_a_class_or_what_it_imports_takes_it() -> None:
    names = read_names("gpt_oss")
    assert {"rope_scaling", "num_local_experts", "layer_types"} <= names
    assert "swiglu_limit" not in names
    assert "sliding_window" in read_names("gemma3")  # found in its text's module
    assert read_names("no such module") == frozenset()


def test_families_say_with_what_their_answers_were_compared() -> None:
    assert verified_by({"model_type": "bailing_moe_linear"}) == "no"
    assert verified_by({"model_type": "llama"}) in ("mlx-lm", "transformers")


def test_a_class_that_takes_its_head_away_may_be_asked_twice() -> None:
    """mlx-lm's Gemma 3 does so at load, where embeddings are tied."""

    class Tied(dict[str, Any]):
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            self.pop("lm_head")
            return weights

    model = Tied()
    assert list_dropped({"model.norm.weight": mx.zeros(4)}, model, {}) == []
    assert not model
