"""A chat model of 33M random weights that sees, in Qwen3-VL's shape, and pictures for it.

The files are as mlx-vlm writes them, whose classes ask for more keys than transformers writes.
"""

import base64
import json
from pathlib import Path
from typing import Any, Final

from benchmarks.checkpoints import TEMPLATE, mark_plain, write_chat_tokenizer

import mlx.core as mx  # isort: skip
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from gateway.bench.pictures import draw_png
from gateway.engine.vision.families import FAMILIES
from gateway.engine.vision.qwen import QwenTower
from gateway.engine.vision.tower_numbers import read_numbers

VOCABULARY: Final = 8192
MARKS: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SIZE: Final = (640, 480)
IMAGE_TOKENS: Final = 300  # tokens of a picture: 16 pixels a patch, 2 × 2 patches a token
TEXT: Final[dict[str, Any]] = {
    "model_type": "qwen3_vl_text",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    },
    "rope_scaling": {"type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True},
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
VISION: Final[dict[str, Any]] = {
    "model_type": "qwen3_vl",
    "depth": 8,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_heads": 4,
    "patch_size": 16,
    "in_channels": 3,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 512,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [2, 5],
    "hidden_act": "gelu_pytorch_tanh",
}
PREPROCESSING: Final[dict[str, Any]] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
}
SHOWN: Final = (
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
)


def write_seeing_chat(folder: Path) -> Path:
    """Write the model: 130 MB, in float32."""
    tokenizer = write_chat_tokenizer(folder, VOCABULARY)
    tokenizer.add_special_tokens([*MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = TEMPLATE.replace("{{ message.content }}", SHOWN)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    ids = {mark: tokenizer.token_to_id(mark) for mark in MARKS}
    text = {**TEXT, "vocab_size": tokenizer.get_vocab_size()}
    config = {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": text,
        "vision_config": VISION,
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vocab_size": text["vocab_size"],
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    for name, content in (("config", config), ("preprocessor_config", PREPROCESSING)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    mx.random.seed(0)
    classes: Any = _get_classes(config)
    weights: dict[str, mx.array] = dict(
        tree_flatten(classes[0](classes[1].from_dict(config)).parameters())
    )
    weights["language_model.lm_head.weight"] *= mark_plain(tokenizer)[:, None]
    numbers = read_numbers(config, FAMILIES["qwen3_vl"])
    tower: Any = tree_flatten(QwenTower(numbers).parameters())  # type: ignore[no-untyped-call]
    weights |= {f"vision_tower.{name}": array for name, array in tower}
    # Pixels as mlx-vlm has them: frames, rows, columns, channels.
    name = "vision_tower.patch_embed.proj.weight"
    patches = weights[name].reshape(-1, 3, 2, 16, 16)
    weights[name] = mx.contiguous(patches.transpose(0, 2, 3, 4, 1))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def picture(seed: int, width: int = SIZE[0], height: int = SIZE[1]) -> str:
    """Return a PNG, the same for the same seed, as a data: URL."""
    encoded = base64.b64encode(draw_png(seed, width, height)).decode()
    return f"data:image/png;base64,{encoded}"
