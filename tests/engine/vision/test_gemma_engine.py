"""Gemma's images in an engine: transformers' tokens in each chunk size, from a kept prefix and
beside other rows, and no image cut that its tokens see as a whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.prefill import cut_outside, cut_prompt, size_chunk
from gateway.engine.kv.prefix_cache import BLOCK
from gateway.engine.vision.features import Images
from gateway.engine.vision.layout import lay_out
from gateway.engine.vision.reading import Row
from gateway.jobs.images import FIRST_IMAGE_ID, ImageSpan
from gateway.jobs.steps import SequenceParams
from tests.engine.generation.harness import PLENTY, Answer, Rows, answers, join, newest
from tests.engine.vision.golden import starts
from tests.engine.vision.harness import (
    CAT,
    DOG,
    TALL,
    WIDE,
    alone,
    open_seeing,
    see,
    sight_of,
    write_gemma,
)
from tests.golden_gemma import cases, paint_grid

NAMES = ["gemma3", "gemma4", "gemma4_vision"]
LONG = "It lies on the mat and purrs. " * 3
Window = tuple[int, int]


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma(request.param, tmp_path_factory.mktemp("gemma") / request.param)


@pytest.fixture(scope="module")
def cold(folder: Path) -> Iterator[GenerationEngine]:
    engine = open_seeing(folder)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def warm(folder: Path) -> Iterator[GenerationEngine]:
    engine = open_seeing(folder, prefix_cache_bytes=PLENTY)
    yield engine
    engine.close()


def golden_params(engine: GenerationEngine, name: str) -> SequenceParams:
    """Return the prompt of a golden case, to be continued greedily."""
    case = cases()[name]
    [params] = engine.prepare(see("Hi", max_tokens=len(case.greedy)))
    prompt, spans = list(case.prompt), []
    for number, (start, grid) in enumerate(zip(starts(case), case.grids, strict=True)):
        end = start + grid[0] * grid[1] // 4
        prompt[start:end] = [FIRST_IMAGE_ID + number + 1] * (end - start)
        pixels = paint_grid(*grid, number).tobytes()
        spans.append(ImageSpan(start, end, bytes([number]) * 32, grid, pixels))
    return replace(params, prompt=prompt, images=spans)


def read(engine: GenerationEngine, name: str, budget: int, beside: Sequence[str] = ()) -> Answer:
    rows = Rows(engine)
    for text in beside:
        rows.add(see(text))
    number = join(rows, golden_params(engine, name))
    rows.answers[number] = Answer(ids=newest(engine).tokens)
    rows.finish(budget)
    assert not rows.faults
    return rows.answers[number]


@pytest.mark.parametrize("budget", [600, 3, 5, 7, 20])
def test_chunks_of_each_size_are_continued_as_by_transformers(
    cold: GenerationEngine, folder: Path, budget: int
) -> None:
    assert read(cold, folder.name, budget).ids == cases()[folder.name].greedy


@pytest.mark.parametrize("budget", [600, 60])
def test_beside_text_a_prompt_is_continued_as_by_transformers(
    cold: GenerationEngine, folder: Path, budget: int
) -> None:
    told = read(cold, folder.name, budget, ["Hello", LONG])
    assert told.ids == cases()[folder.name].greedy


def test_from_a_kept_prefix_a_prompt_is_continued_as_by_transformers(
    warm: GenerationEngine, folder: Path
) -> None:
    for budget in (600, 600, 7):
        assert read(warm, folder.name, budget).ids == cases()[folder.name].greedy


def test_an_image_in_a_kept_prefix_is_not_read_again(warm: GenerationEngine) -> None:
    first, again, other = (alone(warm, see(f"{LONG}@{LONG}{LONG}", x))[0] for x in (CAT, CAT, DOG))
    assert first.ids == again.ids != other.ids
    [same] = alone(warm, see(f"{LONG}@{LONG}{LONG}", CAT))
    assert same.ids == first.ids


@pytest.mark.parametrize("budget", [600, 64, 17, 3])
def test_rows_of_a_mixed_batch_answer_as_alone(cold: GenerationEngine, budget: int) -> None:
    jobs = [see("What is @?", CAT), see("Hello"), see("@ or @?", WIDE, TALL), see(f"{LONG}@", DOG)]
    expected = [alone(cold, job)[0] for job in jobs]
    assert len({tuple(each.ids) for each in expected}) == len(jobs)
    for told, right in zip(answers(cold, jobs, budget), expected, strict=True):
        assert told.ids == right.ids


class Watched:
    """A decoder whose passes are noted, as windows of prompts with images."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self.cuts = 0
        self.passes: list[Window] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def __call__(
        self, tokens: mx.array, rows: Sequence[Row], starts: Sequence[int], **more: Any
    ) -> Any:
        for row, start in zip(rows, starts, strict=True):
            self.passes.append((start, start + tokens.shape[1]))
            for first, features in row.images:
                places = (start, start + tokens.shape[1])
                self.cuts += sum(first < place < first + len(features) for place in places)
        return self._decoder(tokens, rows, starts, **more)


@pytest.mark.generator
@given(st.integers(1, 40), st.integers(0, 90), st.integers(0, 90), st.sampled_from([CAT, WIDE]))
def test_no_chunk_and_no_kept_prefix_cuts_an_image_that_is_read_as_a_whole(
    warm: GenerationEngine, budget: int, before: int, between: int, image: bytes
) -> None:
    sight = sight_of(warm)
    decoder = sight._decoder
    watched = sight._decoder = Watched(decoder)  # type: ignore[assignment]
    try:
        text = f"{'a' * before}@{'b' * between}@ and"
        for end in ("", " more", LONG):  # later prompts go on from the kept KV of earlier ones
            alone(warm, see(text + end, image, DOG, max_tokens=2), budget)
        assert watched.passes
        assert not watched.cuts or not decoder.keeps_whole
    finally:
        sight._decoder = decoder


def images_of(gaps: Sequence[int], tokens: Sequence[int]) -> Images:
    wholes, at = [], 0
    for gap, count in zip(gaps, tokens, strict=False):
        wholes.append((at + gap, at + gap + count))
        at += gap + count
    return Images((), lay_out(1, ()), "", wholes=wholes)


@given(
    st.lists(st.integers(0, 200), max_size=5),
    st.lists(st.integers(1, 300), min_size=5, max_size=5),
    st.integers(1, 600),
    st.lists(st.integers(0, 2000)),
)
def test_chunks_reach_the_end_of_a_prompt_and_end_in_no_image(
    gaps: list[int], tokens: list[int], budget: int, branches: list[int]
) -> None:
    images = images_of(gaps, tokens)
    end = max([stop for _, stop in images.wholes], default=0) + 50
    position, ends = 0, []
    while position < end:
        size = size_chunk(images, position, min(budget, end - position))
        assert 0 < size <= max(budget, *tokens)
        position += size
        ends.append(position)
    assert position == end
    pieces = cut_prompt(0, end, *(each // BLOCK * BLOCK for each in branches), images=images)
    assert sum(pieces) == end
    ends += [sum(pieces[:i]) for i in range(len(pieces))]
    ends += [cut_outside(images, place) for place in range(0, end, BLOCK)]
    assert not any(start < place < stop for start, stop in images.wholes for place in ends)


def test_an_image_at_the_end_of_a_prompt_leaves_no_place_behind_it() -> None:
    """docs/images.md tells these figures."""
    whole = images_of([20], [256])
    assert cut_prompt(0, 305, images=whole) == [305]
    assert cut_prompt(0, 305) == [256, 49]
    assert cut_prompt(0, 500, images=whole) == [448, 52]
