"""Make the references of Gemma's families: configs of tiny models that see, the logits that
transformers computes for a prompt with two pictures, and digests of its processors' pixels.

Needs an environment with torch, as `make reference` does, and runs in the root of the project:
    python -m tests.golden.make_gemma_golden
"""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors import safe_open
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    get_aspect_ratio_preserving_size as fit,
)

from tests.golden.vision.make_pixels import list_sizes
from tests.golden_gemma import (
    END,
    FILE,
    GEMMA3_PROCESSOR,
    GEMMA4_PROCESSOR,
    IMAGE,
    LOGITS,
    PICTURES,
    START,
    paint_grid,
    write_arrays,
)
from tests.golden_vision import FOLDER

GREEDY: Final = 6
_TEXT: Final[dict[str, Any]] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 12,
    "max_position_embeddings": 4096,
}
_VISION: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
}
_GEMMA3: Final = {
    **_TEXT,
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window_pattern": 2,
}
_GEMMA4: Final = {
    **_TEXT,
    "vocab_size_per_layer_input": 320,
    "num_hidden_layers": 6,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "enable_moe_block": False,
}
_VISION4: Final = {
    **_VISION,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 2240,
    "pooling_kernel_size": 2,
}
_MARKS: Final = {"image_token_id": IMAGE, "boi_token_id": START, "eoi_token_id": END}
# Each case has transformers' name, the keys of text, of vision and of the whole, and grids.
CASES: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], list[Any]]]] = {
    "gemma3": (
        "Gemma3",
        _GEMMA3,
        {**_VISION, "image_size": 32, "vision_use_head": False},
        {**_MARKS, "mm_tokens_per_image": 16},
        [(8, 8), (8, 8)],
    ),
    "gemma4": (
        "Gemma4",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
        {**_VISION4, "use_clipped_linears": True},
        {**_MARKS, "audio_config": None},
        [(4, 6), (8, 10)],
    ),
    "gemma4_vision": (
        "Gemma4",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "use_bidirectional_attention": "vision",
        },
        {**_VISION4, "standardize": True},
        {**_MARKS, "audio_config": None},
        [(4, 6), (8, 10)],
    ),
}


def inputs(name: str, grids: list[tuple[int, int]], shift: int = 0) -> dict[str, Any]:
    """Return the pixels of painted grids, as transformers' model takes them."""
    painted = [
        paint_grid(rows, columns, number + shift) for number, (rows, columns) in enumerate(grids)
    ]
    values = [each.astype(np.float32) / 255 for each in painted]
    if name == "gemma3":
        whole = np.stack([(each - 0.5) / 0.5 for each in values]).transpose(0, 3, 1, 2)
        return {"pixel_values": torch.tensor(np.ascontiguousarray(whole))}
    most = max(rows * columns for rows, columns in grids)
    pixels, places = np.zeros((len(grids), most, 48), np.float32), -np.ones((len(grids), most, 2))
    for i, ((rows, columns), each) in enumerate(zip(grids, values, strict=True)):
        count = rows * columns
        split = each.reshape(rows, 4, columns, 4, 3).transpose(0, 2, 1, 3, 4)
        pixels[i, :count] = split.reshape(count, -1)
        row, column = (axis.reshape(-1) for axis in np.mgrid[:rows, :columns])
        places[i, :count] = np.stack([column, row], 1)
    return {
        "pixel_values": torch.tensor(pixels),
        "image_position_ids": torch.tensor(places).long(),
    }


def complete(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with the keys of published files that mlx-lm reads, and that transformers 5
    leaves out or writes in another form.
    """
    text = dict(config["text_config"])
    rope = text["rope_parameters"]
    if config["model_type"] == "gemma3":
        text["rope_theta"] = rope["full_attention"]["rope_theta"]
        text["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        text["sliding_window_pattern"] = 2
    else:
        text["global_head_dim"] = 32
    return {**config, "text_config": text, "vocab_size": text["vocab_size"]}


def make(name: str, folder: Path) -> dict[str, Any]:
    """Return the stored form of one case, and the shapes of its arrays and its logits."""
    kind, text, vision, more, grids = CASES[name]
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **more)
    model_class = getattr(transformers, f"{kind}ForConditionalGeneration")
    model_class(config).save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = {each: file.get_slice(each).get_shape() for each in file.keys()}  # noqa: SIM118
    write_arrays(shapes, folder)
    loaded = model_class.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    drawn = np.random.RandomState(7)
    prompt = drawn.randint(3, 290, 7).tolist()
    for rows, columns in grids:
        prompt += [START, *[IMAGE] * (rows * columns // 4), END, *drawn.randint(3, 290, 9).tolist()]

    def logits(ids: list[int], shift: int = 0) -> Any:
        tokens = torch.tensor([ids])
        kinds = "token_type_ids" if name == "gemma3" else "mm_token_type_ids"
        with torch.no_grad():
            return loaded(
                input_ids=tokens,
                **inputs(name, grids, shift),
                **{kinds: (tokens == IMAGE).int()},
                use_cache=False,
            ).logits[0]

    ids = list(prompt)
    for _ in range(GREEDY):
        ids.append(int(logits(ids)[-1].argmax()))
    found, other = logits(prompt).numpy(), logits(prompt, 5).numpy()
    print(name, "spread", found.std(), "another image", abs(found - other)[-1].max())
    return {
        "case": {
            "config": complete(saved),
            "prompt": prompt,
            "grids": grids,
            "greedy": ids[len(prompt) :],
        },
        "shapes": shapes,
        "logits": found,
    }


def digest(values: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(values, "<f4").tobytes()).hexdigest()


def make_pixels() -> dict[str, Any]:
    """Return digests of the pixels of pictures, and sizes."""
    three_settings: dict[str, Any] = {**GEMMA3_PROCESSOR}
    three = Gemma3ImageProcessorPil(**three_settings)
    found: dict[str, Any] = {"gemma3": {}, "gemma4": {}, "sizes": {}}
    for name in PICTURES:
        picture = Image.open(FOLDER / name).convert("RGB")
        made = three([picture], return_tensors="np")["pixel_values"][0]
        found["gemma3"][name] = digest(made.transpose(1, 2, 0))
        for tokens in (70, 280):
            four_settings: dict[str, Any] = {**GEMMA4_PROCESSOR, "max_soft_tokens": tokens}
            four = Gemma4ImageProcessorPil(**four_settings)
            made = four([picture], return_tensors="np")
            count = int(made["num_soft_tokens_per_image"][0]) * 9
            found["gemma4"][f"{name} {tokens}"] = digest(made["pixel_values"][0][:count])
    for tokens in (70, 140, 280, 560, 1120):
        sizes = [fit(high, wide, 16, tokens * 9, 3)[::-1] for wide, high in list_sizes()]
        text = json.dumps([[int(side) for side in size] for size in sizes])
        found["sizes"][str(tokens)] = hashlib.sha256(text.encode()).hexdigest()
    return found


def main() -> None:
    """Write all cases anew."""
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    known: dict[str, Any] = {}
    stored: dict[str, Any] = {}
    for name in CASES:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as place:
            made = make(name, Path(place))
        known[name] = made["case"]
        stored[name] = made["logits"]
        stored[f"{name} shapes"] = np.array(json.dumps(made["shapes"]))
    written = {"cases": known, "pixels": make_pixels()}
    FILE.write_text(json.dumps(written) + "\n", encoding="utf-8")
    np.savez_compressed(LOGITS, **stored)


if __name__ == "__main__":
    main()
