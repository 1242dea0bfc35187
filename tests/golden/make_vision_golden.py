"""Make the references of tests/engine/vision: the configs of tiny models that see, and the logits
that transformers computes for a prompt with two pictures.

Needs an environment with torch, as `make reference` does, and runs in the root of the project:
    python -m tests.golden.make_vision_golden
"""

import json
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from safetensors import safe_open

from tests.golden_vision import END, FOLDER, IMAGE, START, VIDEO, draw_patches, write_weights

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
# Each case has transformers' names of the config and the model, and the keys of text and vision.
CASES: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "qwen3_5": ("Qwen3_5", _HYBRID, {**_VISION, "depth": 2}),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {**_HYBRID, **_EXPERTS, "shared_expert_intermediate_size": 48},
        {**_VISION, "depth": 2},
    ),
    "qwen3_vl": ("Qwen3VL", _PLAIN, _DEEP),
    "qwen3_vl_moe": ("Qwen3VLMoe", {**_PLAIN, **_EXPERTS}, _DEEP),
}


def make(name: str, text: dict[str, Any], vision: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the stored form of one case, and the shapes of its arrays and its logits."""
    marks = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    ends = {"vision_start_token_id": START, "vision_end_token_id": END}
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, **marks, **ends
    )
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    kind(config).save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = {each: file.get_slice(each).get_shape() for each in file.keys()}  # noqa: SIM118
    write_weights(shapes, folder)
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    drawn = np.random.RandomState(7)
    prompt = drawn.randint(3, 290, 7).tolist()
    for rows, columns in GRIDS:
        prompt += [START, *[IMAGE] * (rows * columns // 4), END, *drawn.randint(3, 290, 5).tolist()]
    patches = [draw_patches(saved["vision_config"], *grid) for grid in GRIDS]

    def logits(ids: list[int]) -> Any:
        tokens = torch.tensor([ids])
        with torch.no_grad():
            return model(
                input_ids=tokens,
                pixel_values=torch.tensor(np.concatenate(patches), dtype=torch.float32),
                image_grid_thw=torch.tensor([(1, *grid) for grid in GRIDS]),
                mm_token_type_ids=(tokens == IMAGE).int(),
                use_cache=False,
            ).logits[0]

    ids = list(prompt)
    for _ in range(GREEDY):
        ids.append(int(logits(ids)[-1].argmax()))
    return {
        "case": {
            "config": saved,
            "prompt": prompt,
            "grids": GRIDS,
            "greedy": ids[len(prompt) :],
        },
        "shapes": shapes,
        "logits": logits(prompt).numpy(),
    }


def main() -> None:
    """Write all cases anew."""
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    known: dict[str, Any] = {}
    stored: dict[str, Any] = {}
    for name, (kind, text, vision) in CASES.items():
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as place:
            made = make(kind, text, vision, Path(place))
        known[name] = made["case"]
        stored[name] = made["logits"]
        stored[f"{name} shapes"] = np.array(json.dumps(made["shapes"]))
        print(name, "spread", made["logits"].std(), made["case"]["greedy"])
    lines = [f" {json.dumps(name)}: {json.dumps(known[name])}" for name in known]
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "cases.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    np.savez_compressed(FOLDER / "logits.npz", **stored)


if __name__ == "__main__":
    main()
