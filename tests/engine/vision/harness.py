"""Tiny seeing models with a tokenizer, painted images in the place of files, and their requests."""

import json
import zlib
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.loading import load_generation, load_weights
from gateway.engine.device import Device
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.loading import read_chat_setup
from gateway.engine.generation.prepare import ChatSetup
from gateway.engine.models.gguf.checkpoint import open_checkpoint
from gateway.engine.vision.features import Recent
from gateway.engine.vision.image_setup import reads_images
from gateway.engine.vision.sight import Sight
from gateway.errors import ModelLoadFailed
from gateway.jobs.chat import GenerateJob, Sampling
from gateway.jobs.images import ImageInput
from tests import golden_gemma
from tests.engine.generation.harness import Answer, Rows
from tests.fakes import caller
from tests.golden_gemma import HALVES
from tests.golden_vision import BREAK, IMAGE, START, VIDEO, cases, merge_of, write_model
from tests.golden_vision import END as VISION_END

PREPROCESSING: Final[dict[str, Any]] = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 64, "longest_edge": 64 * 64},
}
# What Mistral's models have in their place.
PIXTRAL: Final[dict[str, Any]] = {
    "patch_size": {"height": 4, "width": 4},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"longest_edge": 64},
}
GEMMA: Final[dict[str, dict[str, Any]]] = {
    "gemma3": {"size": {"height": 32, "width": 32}, **HALVES},
    "gemma4": {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
}
VOCABULARY: Final = 320
THINK: Final = ("<think>", "</think>")
END: Final = "<|im_end|>"
MARKS: Final[dict[int, str]] = {
    289: "<|system|>", 290: "<|user|>", 291: "<|assistant|>", 292: END, 293: THINK[0],
    294: THINK[1], IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>", START: "<|vision_start|>",
    VISION_END: "<|vision_end|>",
}  # fmt: skip
PIXTRAL_MARKS: Final = {IMAGE: "[IMG]", VISION_END: "[IMG_END]", BREAK: "[IMG_BREAK]"}
TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>{% endif %}"
    "{% endif %}"
)
FREE: Final = Sampling(temperature=0, ignore_eos=True)
SEEDED: Final = Sampling(temperature=1.2, top_p=0.95, seed=11, ignore_eos=True)
# An image's file is its width, its height and a seed; three of one size, and of other ones.
CAT, DOG, COW = b"24 16 1", b"24 16 2", b"24 16 3"
TALL, WIDE, LARGE = b"16 48 4", b"48 16 5", b"64 64 6"
_setups: dict[tuple[object, ...], ChatSetup] = {}  # keys are the files of a folder


def paint(request: Mapping[str, Any], key: bytes) -> tuple[str, Any]:
    """Do as the process that decodes images does, without files: pixels are drawn by a seed."""
    width, height, seed = map(int, request["data"].split())
    if request["kind"] == "measure":
        return "measured", [width, height]
    drawn: NDArray[Any] = np.random.RandomState(seed).randint(0, 256, (height, width, 3))
    rows = np.arange(request["height"]) * height // request["height"]
    columns = np.arange(request["width"]) * width // request["width"]
    return "decoded", drawn[rows][:, columns].astype(np.uint8).tobytes()


def write_seeing(case: str, folder: Path, **changes: Any) -> Path:
    """Write a golden case's model, with a tokenizer of single bytes and of the model's marks."""
    is_pixtral = "projector_hidden_act" in cases()[case].config
    marks = MARKS | PIXTRAL_MARKS if is_pixtral else MARKS
    write_tokenizer(folder, PIXTRAL if is_pixtral else PREPROCESSING, marks)
    if is_pixtral:
        sizes = {"patch_size": 4, "spatial_merge_size": merge_of(cases()[case].config)}
        (folder / "processor_config.json").write_text(json.dumps(sizes), "utf-8")
    return write_model(case, folder, **changes)


def write_gemma(case: str, folder: Path, **changes: Any) -> Path:
    """Write a golden case's model of Gemma's, with the same tokenizer."""
    write_tokenizer(folder, GEMMA[case.removesuffix("_vision")])
    return golden_gemma.write_model(case, folder, **changes)


def write_tokenizer(
    folder: Path, preprocessing: Mapping[str, Any], marks: Mapping[int, str] = MARKS
) -> None:
    """Write the files of a seeing model besides its config and its weights."""
    folder.mkdir(parents=True)
    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary += [f"unused{number}" for number in range(len(vocabulary), VOCABULARY)]
    for token, content in marks.items():
        vocabulary[token] = content
    ids = {content: token for token, content in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(each, special=each not in THINK) for each in marks.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), "utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessing), "utf-8")


def open_seeing(
    folder: Path, *, prefix_cache_bytes: int = 0, speculate_rows: int = 0, **options: Any
) -> GenerationEngine:
    """Open a seeing model; a folder with the same small files is read once."""
    files = [file for file in sorted(folder.iterdir()) if file.suffix != ".safetensors"]
    key = tuple((file.name, file.read_bytes()) for file in files)
    if key not in _setups:
        _setups[key] = read_chat_setup(folder, name="tiny", max_context=None, image_sandbox=paint)
    setup = _setups[key]
    setup = replace(setup, checkpoint=open_checkpoint("tiny", folder), chat=copy(setup.chat))
    options |= {"prefix_cache_bytes": prefix_cache_bytes, "speculate_rows": speculate_rows}
    return load_weights(setup, device=Device.CPU, **options)


def complaint(folder: Path) -> str:
    """Return why a folder's model reads no images: the reason of its refusal, or its notes."""
    try:
        engine = load_generation(folder, name="tiny", device=Device.CPU, image_sandbox=paint)
    except ModelLoadFailed as error:
        return str(error)
    assert engine.facts.images is None
    assert not reads_images(folder)
    engine.close()
    return "\n".join(engine.facts.notes)


def sight_of(engine: GenerationEngine) -> Sight:
    """Return the sight of an engine that reads images."""
    assert engine._sight is not None
    return engine._sight


def keep_features(engine: GenerationEngine, most_bytes: int) -> None:
    """Forget the features of all images, and keep those of later ones in so many bytes."""
    sight_of(engine)._kept = Recent(most_bytes, lambda features: features.nbytes)


def see(
    text: str, *images: bytes, sampling: Sampling = FREE, salt: str = "", **more: Any
) -> GenerateJob:
    """Ask about images, each of which stands where the text has an @."""
    inputs = []
    for number, data in enumerate(images):
        word = f"image{zlib.crc32(text.encode()):08x}number{number}z"
        text = text.replace("@", word, 1)
        place = f"messages[0].content[{number}]"
        inputs.append(ImageInput(data, word, place, "image_url"))
    more.setdefault("max_tokens", 10)
    messages = [{"role": "user", "content": text}]
    return GenerateJob(
        caller=replace(caller(), cache_salt=salt),
        messages=messages,
        sampling=sampling,
        images=inputs,
        **more,
    )


def alone(engine: GenerationEngine, job: GenerateJob, budget: int = 512) -> list[Answer]:
    """Return a job's answers when nothing else runs."""
    rows = Rows(engine)
    rows.add(job)
    told = rows.finish(budget)
    assert not rows.faults
    return told
