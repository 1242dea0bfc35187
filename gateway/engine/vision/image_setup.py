"""The decision whether and how a model reads images, made from its files, without mlx."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gateway.engine.models.counts import text_config
from gateway.engine.models.folder import Folder, Tensor
from gateway.engine.vision.families import Family, family_of
from gateway.engine.vision.gemma_patches import GemmaPatches, read_gemma3, read_gemma4
from gateway.engine.vision.patches import Patches, read_pixtral, read_qwen
from gateway.engine.vision.tower_numbers import read_numbers
from gateway.errors import ModelLoadFailed

_EMBEDDINGS: Final = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Marks:
    """An image's token in a prompt, and the tokens and texts around an image."""

    image: int
    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    before: str = ""  # joins the text before `start`
    after: str = ""
    row_ends: tuple[int, ...] = ()  # the token that ends a row, and the one that ends the last


@dataclass(frozen=True, slots=True)
class ImageSetup:
    """How a model reads images."""

    patches: Patches
    marks: Marks


_PATCHES: Final[Mapping[str, Callable[[Folder], Patches]]] = {
    "qwen3": read_qwen,
    "qwen2_5": read_qwen,
    "mistral": read_pixtral,
    "gemma3": read_gemma3,
    "gemma4": read_gemma4,
}


def reads_images(folder: Path) -> bool:
    """Return True if a folder's model reads images, and False also for faulty files."""
    files = Folder(folder.name, folder)
    try:
        return has_tower(files) and bool(read_image_setup(files))
    except ModelLoadFailed:
        return False


def has_tower(files: Folder) -> bool:
    """Return True if a model's files have a tower of a supported family."""
    family = family_of(files.config())
    return family is not None and family.is_in(files.all_tensors())


def read_image_setup(files: Folder) -> ImageSetup:
    """Read how a model with a tower reads images. Raises ModelLoadFailed if it does not."""
    config = files.config()
    family = family_of(config)
    assert family is not None
    with files.reading_config():
        numbers = read_numbers(config, family)
    patches = _PATCHES[family.name](files)
    side = patches.side if isinstance(patches, GemmaPatches) else None
    with files.reading_config():
        numbers.check_fit(patches.patch, patches.merge, patches.frames, side)
        marks = _read_marks(files, family)
    return ImageSetup(patches, marks)


def _read_marks(files: Folder, family: Family) -> Marks:
    """Read the ids around images. Raises TypeError, ValueError and ModelLoadFailed."""
    config = files.config()
    # transformers has both names of a key.
    names = [(key, key.replace("_index", "_id")) for key in family.ids]
    ids: list[Any] = [config.get(key, config.get(name, family.ids[key])) for key, name in names]
    if family.row_ends:
        known, processor = _read_tokens(files), files.read_object("processor_config.json")
        ids += [known.get(str(processor.get(key, mark))) for key, mark in family.row_ends.items()]
    count = text_config(config).get("vocab_size") or _count_embeddings(files.all_tensors())
    for (key, _), each in zip([*names, *family.row_ends.items()], ids, strict=True):
        if type(each) is not int or not 0 <= each < count:
            raise ValueError(f"{key} is {each!r:.40}, and ids of tokens are 0 to {count - 1}")
    image, *around = ids[: len(names)]
    row_ends = tuple(ids[len(names) :])
    return Marks(image, (*around[:1],), (*around[1:],), family.before, family.after, row_ends)


def _read_tokens(files: Folder) -> dict[str, int]:
    """Return the ids of the tokens in tokenizer.json. Raises ModelLoadFailed."""
    tokenizer = files.read_object("tokenizer.json")
    with files.blame("tokenizer.json: "):
        added = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
        return {**tokenizer["model"]["vocab"], **added}


def _count_embeddings(tensors: Mapping[str, Tensor]) -> int:
    shapes = [each.shape for name, each in tensors.items() if name.endswith(_EMBEDDINGS)]
    return max((shape[0] for shape in shapes if shape), default=0)
