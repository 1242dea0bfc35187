"""Make the references of tests/engine/vision: the configs of tiny models that see, and the logits
that transformers computes for a prompt with two pictures.

Needs an environment with torch, as `make reference` does, and runs in the root of the project:
    python -m tests.golden.make_vision_golden
Each set of families has files of its own; names of sets as arguments make only these.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from safetensors import safe_open

from tests.golden_vision import (
    BREAK,
    END,
    FOLDER,
    IMAGE,
    START,
    VIDEO,
    draw_patches,
    merge_of,
    write_weights,
)

GRIDS: Final = [(4, 6), (8, 4)]
GREEDY: Final = 6
_TEXT: Final = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_ROPE: Final = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [6, 5, 5],
    "mrope_interleaved": True,
}
_HYBRID: Final = {
    **_TEXT,
    "head_dim": 64,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
}
_PLAIN: Final = {**_TEXT, "head_dim": 32, "rope_parameters": _ROPE}
_EXPERTS: Final = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_VISION: Final = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
}
_DEEP: Final = {**_VISION, "depth": 3, "deepstack_visual_indexes": [0, 1]}
_WINDOWS: Final = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "depth": 3,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
_SECTIONS: Final = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_PIXTRAL: Final = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 64,
}
_YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_MISTRAL: Final = {**_TEXT, "head_dim": 16, "sliding_window": None}
_QWEN_MARKS: Final = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_MISTRAL_MARKS: Final = {"image_token_index": IMAGE, "tie_word_embeddings": False}
# The sets have cases, and each case has transformers' names of the config and the model, and the
# keys of the config.
Case = tuple[str, dict[str, Any]]
_GRIDS: Final[Mapping[str, list[tuple[int, int]]]] = {
    "qwen2_5_vl": [(4, 6), (6, 10)],  # windows of six shapes
    "pixtral": [(2, 3), (4, 2)],
}


def _qwen(name: str, text: dict[str, Any], vision: dict[str, Any]) -> Case:
    return name, {"text_config": text, "vision_config": vision, **_QWEN_MARKS}


def _mistral(name: str, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> Case:
    return name, {
        "text_config": {**_MISTRAL, **text},
        "vision_config": {"model_type": "pixtral", **_PIXTRAL, **vision},
        **_MISTRAL_MARKS,
        **more,
    }


SETS: Final[dict[str, dict[str, Case]]] = {
    "": {
        "qwen3_5": _qwen("Qwen3_5", _HYBRID, {**_VISION, "depth": 2}),
        "qwen3_5_moe": _qwen(
            "Qwen3_5Moe",
            {**_HYBRID, **_EXPERTS, "shared_expert_intermediate_size": 48},
            {**_VISION, "depth": 2},
        ),
        "qwen3_vl": _qwen("Qwen3VL", _PLAIN, _DEEP),
        "qwen3_vl_moe": _qwen("Qwen3VLMoe", {**_PLAIN, **_EXPERTS}, _DEEP),
    },
    "_qwen2": {
        "qwen2_5_vl": _qwen("Qwen2_5_VL", {**_TEXT, "rope_parameters": _SECTIONS}, _WINDOWS),
    },
    "_mistral": {
        "mistral3": _mistral("Mistral3", {"model_type": "mistral"}, {"hidden_act": "silu"}),
        "ministral3": _mistral(
            "Mistral3",
            {"model_type": "ministral3", "rope_parameters": _YARN},
            {"hidden_act": "gelu"},
            multimodal_projector_bias=True,
        ),
        "pixtral": _mistral(
            "Llava",
            {"model_type": "mistral"},
            {"hidden_act": "silu"},
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
    },
}


def make(case: str, name: str, given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the stored form of one case, and the shapes of its arrays and its logits."""
    config = getattr(transformers, f"{name}Config")(**given)
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    kind(config).save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = {each: file.get_slice(each).get_shape() for each in file.keys()}  # noqa: SIM118
    write_weights(shapes, folder)
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    drawn = np.random.RandomState(7)
    prompt = drawn.randint(3, 290, 7).tolist()
    grids, merge = _GRIDS.get(case, GRIDS), merge_of(saved)
    is_qwen = "qwen" in case
    for rows, columns in grids:
        if is_qwen:
            prompt += [START, *[IMAGE] * (rows * columns // 4), END]
        else:
            prompt += [*[IMAGE] * (columns // merge), BREAK] * (rows // merge)
            prompt[-1] = END
        prompt += drawn.randint(3, 290, 5).tolist()
    patches = [draw_patches(saved["vision_config"], *grid) for grid in grids]

    def logits(ids: list[int]) -> Any:
        tokens = torch.tensor([ids])
        images = {
            "pixel_values": torch.tensor(np.concatenate(patches), dtype=torch.float32),
            "image_grid_thw": torch.tensor([(1, *grid) for grid in grids]),
            "mm_token_type_ids": (tokens == IMAGE).int(),
        }
        if not is_qwen:
            images = as_pixels(patches, grids, merge)
        with torch.no_grad():
            return model(input_ids=tokens, use_cache=False, **images).logits[0]

    ids = list(prompt)
    for _ in range(GREEDY):
        ids.append(int(logits(ids)[-1].argmax()))
    return {
        "case": {
            "config": saved,
            "prompt": prompt,
            "grids": grids,
            "greedy": ids[len(prompt) :],
        },
        "shapes": shapes,
        "logits": logits(prompt).numpy(),
    }


def as_pixels(patches: list[Any], grids: list[tuple[int, int]], merge: int) -> dict[str, Any]:
    """Return images of patches that are ordered by token, padded to one size."""
    sides = [max(side) for side in zip(*grids, strict=True)]
    patch = round((patches[0].shape[1] / 3) ** 0.5)
    pixels = torch.zeros(len(grids), 3, sides[0] * patch, sides[1] * patch)
    for image, each, (rows, columns) in zip(pixels, patches, grids, strict=True):
        split = each.reshape(rows // merge, columns // merge, merge, merge, 3, patch, patch)
        shape = (3, rows * patch, columns * patch)
        whole = split.transpose(4, 0, 2, 5, 1, 3, 6).reshape(shape)
        image[:, : shape[1], : shape[2]] = torch.tensor(whole)
    sizes = torch.tensor([(rows * patch, columns * patch) for rows, columns in grids])
    return {"pixel_values": pixels, "image_sizes": sizes}


def main() -> None:
    """Write all cases anew, or those of the named sets."""
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    for suffix in sys.argv[1:] or SETS:
        known: dict[str, Any] = {}
        stored: dict[str, Any] = {}
        for name, (kind, given) in SETS[suffix].items():
            torch.manual_seed(0)
            with tempfile.TemporaryDirectory() as place:
                made = make(name, kind, given, Path(place))
            known[name] = made["case"]
            stored[name] = made["logits"]
            stored[f"{name} shapes"] = np.array(json.dumps(made["shapes"]))
            print(name, "spread", made["logits"].std(), made["case"]["greedy"])
        lines = [f" {json.dumps(name)}: {json.dumps(known[name])}" for name in known]
        text = "{\n" + ",\n".join(lines) + "\n}\n"
        (FOLDER / f"cases{suffix}.json").write_text(text, encoding="utf-8")
        np.savez_compressed(FOLDER / f"logits{suffix}.npz", **stored)


if __name__ == "__main__":
    main()
