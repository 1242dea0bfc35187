"""Make the references of tests/engine/models/test_corrections.py: the configs of tiny decoders, and
the logits that transformers computes for them.

Needs an environment with torch, as `make reference` does, and runs in the root of the project:
    python -m tests.golden.make_decoder_golden
"""

import json
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from safetensors import safe_open
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from benchmarks.reference import configs, forms
from benchmarks.reference.keys import SHAPES
from tests.golden_decoders import FOLDER, PROMPT, VOCABULARY, write_weights

THETA: Final = {"rope_theta": 10000.0}
YARN: Final = {
    **THETA,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
BEYOND: Final = {"max_position_embeddings": 64}
HALF: Final = {"partial_rotary_factor": 0.5}
FACTORS: Final = {
    "short_factor": [round(1.0 + 0.05 * at, 3) for at in range(16)],
    "long_factor": [round(1.0 + 0.5 * at, 3) for at in range(16)],
}


def _yarn(**more: Any) -> dict[str, Any]:
    return {**BEYOND, "rope_parameters": {**YARN, **more}}


def _longrope(original: int) -> dict[str, Any]:
    rope = {**THETA, "rope_type": "longrope", "factor": 4.0, **FACTORS}
    return {
        "max_position_embeddings": 4 * original,
        "original_max_position_embeddings": original,
        "rope_parameters": {**rope, "original_max_position_embeddings": original},
    }


_DYNAMIC: Final = {**THETA, "rope_type": "dynamic", "factor": 2.0}
_GPT_OSS: Final = SHAPES["gpt_oss"]["the originals' rotation"]
# Each case has the family, the form of its files, and the keys that differ from the tiny configs'.
CASES: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "arcee": ("arcee", "v5", {}),
    "ernie4_5_moe router's bias": ("ernie4_5_moe", "hub", {}),
    "exaone_moe of transformers 5": ("exaone_moe", "v5", {}),
    "falcon_h1 keys' multiplier": ("falcon_h1", "hub", {"key_multiplier": 0.4}),
    "gemma3n_text shared": ("gemma3n_text", "v5", SHAPES["gemma3n_text"]["shared"]),
    "gemma4_text of transformers 5": ("gemma4_text", "v5", {"global_head_dim": 64}),
    "glm half heads": ("glm", "hub", {}),
    "glm4_moe yarn": ("glm4_moe", "hub", _yarn(**HALF)),
    "gpt_oss of transformers 5": ("gpt_oss", "v5", {}),
    "gpt_oss yarn, truncate": ("gpt_oss", "hub", _GPT_OSS),
    "granitemoehybrid of transformers 5": ("granitemoehybrid", "v5", {}),
    "granitemoehybrid yarn": (
        "granitemoehybrid",
        "hub",
        {"position_embedding_type": "rope", **_yarn()},
    ),
    "jamba experts' weights": ("jamba", "hub", {}),
    "lfm2_vl": ("lfm2_vl", "v5", {}),
    "llama dynamic": ("llama", "hub", {**BEYOND, "rope_parameters": _DYNAMIC}),
    "llama gelu": ("llama", "hub", {"hidden_act": "gelu"}),
    "llama yarn, attention_factor": ("llama", "hub", _yarn(attention_factor=1.0)),
    "llama yarn, attention_factor of transformers 5": ("llama", "v5", _yarn(attention_factor=1.0)),
    "minicpm3 tied head": ("minicpm3", "hub", {"tie_word_embeddings": True}),
    "ministral": ("ministral", "v5", {}),
    "mixtral yarn": ("mixtral", "hub", _yarn()),
    "phi3 longrope, beyond": ("phi3", "hub", _longrope(32)),
    "phi3 longrope, within": ("phi3", "hub", _longrope(64)),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", "v5", {}),
    "qwen3_5_text": ("qwen3_5_text", "v5", {}),
    "qwen3_moe gelu": ("qwen3_moe", "hub", {"hidden_act": "gelu"}),
    "qwen3_moe of transformers 5": ("qwen3_moe", "v5", {}),
    "qwen3_moe yarn": ("qwen3_moe", "hub", _yarn()),
}


def _loader(config: Any) -> Any:
    return AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM


def make(kind: str, form: str, changes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the stored form of one case: its config, the shapes of its arrays and its logits."""
    small = {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY}
    defaults = CONFIG_MAPPING[kind]().get_text_config().to_dict()
    small = {key: value for key, value in small.items() if key in defaults}
    config = configs.tiny(CONFIG_MAPPING[kind], **small, **changes)
    eager = {"attn_implementation": "eager"}
    _loader(config).from_config(config, **eager).save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    write_weights(shapes, folder)
    model, about = _loader(config).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **eager
    )
    assert not any(about.values()), about
    with torch.no_grad():
        found = model.eval()(input_ids=torch.tensor([PROMPT]), use_cache=False)
    return {
        "config": forms.as_original(saved, config) if form == "hub" else saved,
        "shapes": shapes,
        "logits": found.logits[0].numpy().astype(np.float16),
    }


def main() -> None:
    """Write all cases anew."""
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    known: dict[str, Any] = {}
    stored: dict[str, Any] = {}
    for name, (kind, form, changes) in CASES.items():
        with tempfile.TemporaryDirectory() as place:
            made = make(kind, form, changes, Path(place))
        known[name] = {"form": form, "config": made["config"]}
        stored[name] = made["logits"]
        stored[f"{name} shapes"] = np.array(json.dumps(made["shapes"]))
    lines = [f" {json.dumps(name)}: {json.dumps(known[name])}" for name in known]
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "cases.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    np.savez_compressed(FOLDER / "logits.npz", **stored)


if __name__ == "__main__":
    main()
