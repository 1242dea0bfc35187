"""The images of a model's sequences, encoded once and read in place of their tokens."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import mlx.core as mx
import numpy as np

from gateway.engine.device import evaluate
from gateway.engine.models.decoders import parameters
from gateway.engine.vision.features import Images, Recent, SeenSequence
from gateway.engine.vision.image_setup import Marks
from gateway.engine.vision.kinds import Tower, kind_of
from gateway.engine.vision.patches import Patches
from gateway.engine.vision.reading import Row, SeeingDecoder
from gateway.jobs.images import FIRST_IMAGE_ID, ImageSpan
from gateway.jobs.steps import ImageCost, SequenceParams

FEATURE_BYTES: Final = 128 << 20  # for recently encoded images
_TEXT: Final = Row()


class Sight:
    """A model's tower and the decoder that reads its features, used on the lane."""

    def __init__(
        self,
        model: Any,
        tower: Tower,
        config: dict[str, Any],
        preprocessing: Patches,
        marks: Marks,
        most_bytes: int = FEATURE_BYTES,
    ) -> None:
        """Raises ValueError for a model that cannot read images."""
        self._decoder = kind_of(config).decoder(model, config)
        self._tower = tower
        self._preprocessing = preprocessing
        self._image_token, self._row_ends = marks.image, marks.row_ends
        self._kept: Recent[tuple[str, bytes], mx.array] = Recent(most_bytes, _count_bytes)
        self.encoded = 0  # images that the tower encoded
        self.recalled = 0  # images whose features were cached

    @property
    def cost(self) -> ImageCost:
        whole = self._preprocessing.most_tokens if self._decoder.keeps_whole else 0
        kept = self._kept.most_bytes
        return ImageCost(self._tower.token_bytes, kept, whole, self._decoder.window)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in parameters(self._tower)) + self._kept.nbytes

    def begin(self, params: SequenceParams) -> Images | None:
        if not params.images:
            return None
        places = [(each.start, self._preprocessing.places(each.grid)) for each in params.images]
        layout = self._decoder.lay_out(len(params.prompt), places)
        spans = [(each.start, each.end) for each in params.images]
        wholes = spans if self._decoder.keeps_whole else ()
        return Images(params.images, layout, params.cache_salt, wholes=wholes)

    def encode(self, rows: Sequence[tuple[Images | None, int]]) -> Iterator[None]:
        """Encode the images that are not in the KV cache yet, in steps. Raises ValueError."""
        for images, known in rows:
            for span in images.spans if images is not None else ():
                assert images is not None
                if span.end <= known or span.start in images.features:
                    continue
                features = self._kept.get((images.salt, span.key))
                if features is None:
                    features = yield from self._encode(span)
                    self._kept.keep((images.salt, span.key), features)
                else:
                    self.recalled += 1
                images.features[span.start] = features

    def _encode(self, span: ImageSpan) -> Generator[None, None, mx.array]:
        rows, columns = self._preprocessing.pixels(span.grid)
        rgb = np.frombuffer(span.pixels, np.uint8).reshape(rows, columns, 3)
        patches = mx.array(self._preprocessing.to_patches(rgb))
        features = yield from self._tower.encode(patches, span.grid)
        if self._row_ends:
            rows, _ = self._preprocessing.places(span.grid)
            features = self._decoder.end_rows(features, rows, *self._row_ends)
        evaluate(features)
        if not mx.all(mx.isfinite(features)).item():
            raise ValueError("the features of an image are not finite")
        self.encoded += 1
        return features

    def make_up(
        self, prompt: Sequence[int], start: int, size: tuple[int, int]
    ) -> tuple[list[int], Images]:
        """Return a test prompt with an image of `size` (rows, columns) in tokens.

        The features are the replaced tokens' embeddings in reverse order.
        """
        end = start + size[0] * size[1]
        features = self._decoder.embed(prompt[start:end][::-1])[:, None]
        images = Images((), self._decoder.lay_out(len(prompt), [(start, size)]), "")
        images.features[start] = mx.repeat(features, self._tower.depth, axis=1)
        return [*prompt[:start], *[self._image_token] * (end - start), *prompt[end:]], images

    def tokens(self, ids: Sequence[int]) -> list[int]:
        """Return ids with the model's image token instead of ids of images."""
        return [self._image_token if each >= FIRST_IMAGE_ID else each for each in ids]

    def reader(self, seqs: Sequence[SeenSequence]) -> "PromptReader":
        return PromptReader(self._decoder, seqs)

    @contextmanager
    def placed(self, seqs: Sequence[SeenSequence]) -> Iterator[None]:
        """Inside the context, build passes of tokens after these sequences' prompts."""
        rows = [_TEXT if each.images is None else each.images.row for each in seqs]
        behind = [0 if each.images is None else len(each.images.layout.points) for each in seqs]
        with self._decoder.placed(rows, behind):
            yield

    def clear(self, seqs: Sequence[SeenSequence] = ()) -> None:
        self._kept.clear()
        for seq in seqs:
            if seq.images is not None:
                seq.images.features.clear()

    def close(self) -> None:
        self._kept.clear()
        del self._tower, self._decoder


def _count_bytes(features: mx.array) -> int:
    return features.nbytes


class PromptReader:
    """A model that reads a batch's prompts, called as mlx-lm's models are."""

    def __init__(self, decoder: SeeingDecoder, seqs: Sequence[SeenSequence]) -> None:
        self._decoder, self._seqs = decoder, seqs
        self._starts: list[int] = []

    def begin(self, starts: Sequence[int]) -> None:
        """Set each row's number of tokens in the KV cache."""
        self._starts = [*starts]

    def __call__(self, tokens: mx.array, **options: Any) -> mx.array:
        """Read tokens, (rows, n), padded on the right."""
        seqs = self._seqs[: len(self._starts)]
        rows = [_TEXT if each.images is None else each.images.row for each in seqs]
        logits = self._decoder(tokens, rows, self._starts, **options)
        self._starts = [start + tokens.shape[1] for start in self._starts]
        return logits
