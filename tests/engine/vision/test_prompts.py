"""Images of a request → ids and spans of its prompt; the files that cannot be read."""

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.vision import prompts
from gateway.engine.vision.features import Recent
from gateway.engine.vision.image_setup import Marks
from gateway.engine.vision.patches import QwenPatches
from gateway.engine.vision.prompts import (
    MOST_TOKENS,
    Decoded,
    ImageFormat,
    place_images,
)
from gateway.errors import BadRequest, ContextLengthExceeded, Overloaded, Unavailable
from gateway.jobs.chat import GenerateJob
from gateway.jobs.images import FIRST_IMAGE_ID, Detail, ImageInput
from tests.engine.generation.harness import bare, ids
from tests.engine.vision.harness import CAT, COW, DOG, LARGE, TALL, WIDE, alone, paint, see
from tests.golden_vision import END, IMAGE, START

# The numbers of Qwen3-VL's preprocessor_config.json.
PATCHES = QwenPatches(
    16, 2, 2, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255, "bicubic", 256 * 256, 4096 * 4096
)
SMALL = replace(PATCHES, patch=4, least_pixels=64, most_pixels=4096)
FORMAT = ImageFormat(SMALL, Marks(IMAGE, (START,), (END,)), paint, 4096)


@pytest.fixture(autouse=True)
def decoded(monkeypatch: pytest.MonkeyPatch) -> Recent[bytes, Decoded]:
    """Keep none of the images that other tests have decoded, in other ways."""
    recent: Recent[bytes, Decoded] = Recent(1 << 20, lambda each: len(each.pixels))
    monkeypatch.setattr(prompts, "_DECODED", recent)
    return recent


def image(data: bytes, number: int = 0, detail: Detail = "auto") -> ImageInput:
    return ImageInput(data, f"word{number}w", f"input[{number}]", "input_image", detail)


def letters(text: str) -> list[int]:
    return [ord(each) for each in text]


def test_ids_and_spans_stand_where_the_words_stood() -> None:
    """The images are named in another order than the text has them."""
    images = [image(DOG, 1), image(CAT, 0)]
    prompt, spans = place_images("ab word0w word1w z", images, FORMAT, letters)
    assert [prompt[span.start - 1] for span in spans] == [START, START]
    assert [prompt[span.end] for span in spans] == [END, END]
    assert [span.key for span in spans] == [
        FORMAT.read([image(each)])[0].key for each in (CAT, DOG)
    ]
    assert [span.tokens for span in spans] == [6, 6]
    text = [token for token in prompt if token < START]
    assert text == letters("ab   z")
    for span in spans:
        own = {*prompt[span.start : span.end]}
        assert len(own) == 1
        assert min(own) >= FIRST_IMAGE_ID
        assert len(span.pixels) == 16 * span.grid[0] * span.grid[1] * 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "word0w only",
        "word0w word1w word0w",
        "word0wword1wword1w",
        "WORD0W word1w",
        "word0 word1",
    ],
)
def test_words_missing_or_twice_in_the_text_are_refused_by_place(text: str) -> None:
    with pytest.raises(BadRequest) as refused:
        place_images(text, [image(CAT, 0), image(DOG, 1)], FORMAT, letters)
    wrong = [number for number in (0, 1) if text.count(f"word{number}w") != 1]
    assert refused.value.param in [f"input[{number}]" for number in wrong]
    assert str(refused.value.param) in refused.value.message
    assert "chat template" in refused.value.message


def test_nothing_is_decoded_for_a_text_that_is_refused() -> None:
    def never(request: Mapping[str, Any], key: bytes) -> tuple[str, Any]:
        raise AssertionError

    with pytest.raises(BadRequest):
        place_images("word0w", [image(CAT), image(DOG, 1)], replace(FORMAT, sandbox=never), letters)


def test_an_image_is_decoded_once_and_by_its_detail() -> None:
    asked: list[str] = []

    def counting(request: Mapping[str, Any], key: bytes) -> tuple[str, Any]:
        asked.append(request["kind"])
        return paint(request, key)

    formats = replace(FORMAT, sandbox=counting)
    one, other = formats.read([image(CAT)])[0], formats.read([image(CAT, 5)])[0]
    assert one is other
    assert asked == ["measure", "decode"]
    details: tuple[Detail, ...] = ("low", "high")
    for detail in details:
        assert formats.read([image(CAT, detail=detail)])[0].key == one.key
    assert asked.count("decode") == 3
    assert formats.read([image(CAT)], "another caller's")[0].key == one.key
    assert asked.count("decode") == 4, "its time would tell one caller of another's image"
    assert len(formats.ids(one)) == 8


def test_values_least_recently_used_make_room() -> None:
    recent: Recent[str, bytes] = Recent(100, len)
    for name in "ab":
        recent.keep(name, bytes(40))
    assert recent.get("a") is not None
    recent.keep("c", bytes(40))
    assert recent.get("b") is None
    assert recent.get("a") is not None
    recent.keep("d", bytes(101))
    recent.keep("c", bytes(1))
    assert recent.get("d") is None
    assert recent.nbytes == 80
    recent.clear()
    assert (recent.get("a"), recent.nbytes) == (None, 0)


def test_ids_differ_by_content_by_shape_and_by_secret() -> None:
    """A process draws its secret, so nobody can look for images of one id."""
    read = [FORMAT.read([image(each)])[0] for each in (CAT, DOG, COW, TALL, WIDE, LARGE)]
    own = [FORMAT.ids(each)[1] for each in read]
    assert len({*own}) == len(own)
    turned = Decoded(read[0].key, read[0].grid, read[0].pixels)
    assert FORMAT.ids(turned)[1] == own[0]
    other = replace(FORMAT, secret=b"of another process")
    assert not {*own} & {other.ids(each)[1] for each in read}
    assert len(FORMAT.secret) == 32
    assert max(own) < FIRST_IMAGE_ID + (1 << 56)


def test_pixels_of_one_content_and_other_shapes_have_other_keys() -> None:
    """A row of white patches and a column of them have the same bytes."""

    def white(request: Mapping[str, Any], key: bytes) -> tuple[str, Any]:
        if request["kind"] == "measure":
            return "measured", [*struct.unpack("BB", request["data"])]
        return "decoded", b"\xff" * (request["width"] * request["height"] * 3)

    formats = replace(FORMAT, sandbox=white)
    one, other = (formats.read([image(bytes(size))])[0] for size in ([16, 32], [32, 16]))
    assert one.pixels == other.pixels
    assert one.key != other.key
    assert formats.ids(one)[1] != formats.ids(other)[1]


def answering(outcome: str, value: Any, measured: Any = (24, 16)) -> ImageFormat:
    """Return a format whose sandbox measures, and answers a decoding like this."""

    def answer(request: Mapping[str, Any], key: bytes) -> tuple[str, Any]:
        if request["kind"] == "measure":
            return "measured", list(measured) if isinstance(measured, tuple) else measured
        return outcome, value

    return replace(FORMAT, sandbox=answer)


@pytest.mark.parametrize(
    ("outcome", "value", "error"),
    [
        ("refused", "it is cut off", BadRequest),
        ("large", "it takes too much memory", BadRequest),
        ("died", "of a signal", BadRequest),
        ("late", "it took too long", BadRequest),
        ("busy", "", Overloaded),
        ("killed", "by the system", Unavailable),
        ("slow", "no processor", Unavailable),
        ("decoded", b"\0" * 5, BadRequest),
        ("decoded", "text", BadRequest),
        ("decoded", None, BadRequest),
        ("of its own", [], BadRequest),
    ],
)
def test_an_image_that_is_not_decoded_is_refused_by_place(
    outcome: str, value: Any, error: type[Exception]
) -> None:
    formats = answering(outcome, value)
    with pytest.raises(error) as refused:
        formats.read([image(CAT, 7)])
    if error is BadRequest:
        assert "input[7]" in str(refused.value)
    with pytest.raises(error):
        formats.read([image(CAT, 7)])


@pytest.mark.parametrize(
    "measured",
    [None, [], (1,), (1, 2, 3), ("1", "2"), (0, 5), (5, 0), (-3, 4), (10**400, 1), (1 << 40, 8),
     (1.5, 2), "24", (True, 10**30)],
)  # fmt: skip
def test_sizes_that_no_image_has_are_refused_by_place(measured: Any) -> None:
    """The process that reads files may be in the hands of one of them."""
    formats = answering("decoded", b"", measured)
    with pytest.raises(BadRequest, match=r"input\[7\]"):
        formats.read([image(CAT, 7)])


@given(st.integers(4, 16_384), st.integers(4, 16_384), st.sampled_from(["low", "auto", "high"]))
def test_an_image_has_no_more_tokens_than_its_detail_allows(
    width: int, height: int, detail: Detail
) -> None:
    """Images may be 200 times as long as they are wide."""
    if max(width, height) > 200 * min(width, height):
        return
    wide, high = PATCHES.size(width, height, MOST_TOKENS[detail])
    assert wide % 32 == high % 32 == 0
    assert min(wide, high) >= 32
    assert PATCHES.tokens(wide, high) <= MOST_TOKENS[detail]
    rows, columns = PATCHES.grid(wide, high)
    assert rows * columns == 4 * PATCHES.tokens(wide, high)


def test_a_job_has_the_spans_of_its_images(cold: GenerationEngine) -> None:
    [params] = cold.prepare(see("a@b@@c", CAT, TALL, CAT))
    assert [span.tokens for span in params.images] == [6, 12, 6]
    for one, other in pairwise(params.images):
        assert one.end < other.start
    assert params.images[0].key == params.images[2].key != params.images[1].key
    vocabulary = [token for token in params.prompt if token < FIRST_IMAGE_ID]
    assert IMAGE not in vocabulary
    assert len(vocabulary) == len(params.prompt) - 24


def test_marks_that_a_user_writes_are_no_images(cold: GenerationEngine) -> None:
    text = "<|vision_start|><|image_pad|><|vision_end|> and a @"
    [params] = cold.prepare(see(text, CAT))
    assert len(params.images) == 1
    assert params.prompt.count(START) == 2
    assert ids(alone(cold, see(text, CAT)))
    [params] = cold.prepare(see(text))
    assert params.images == ()
    assert ids(alone(cold, see(text)))


def without_word(job: GenerateJob) -> GenerateJob:
    return replace(job, messages=[{"role": "user", "content": "What is it?"}])


def with_word_twice(job: GenerateJob) -> GenerateJob:
    return replace(job, messages=[*job.messages, *job.messages])


@pytest.mark.parametrize("change", [without_word, with_word_twice])
def test_a_conversation_that_does_not_show_an_image_once_is_refused(
    cold: GenerationEngine, change: Callable[[GenerateJob], GenerateJob]
) -> None:
    with pytest.raises(BadRequest, match=r"messages\[0\]\.content\[0\]"):
        cold.prepare(change(see("What is @?", CAT)))


def test_an_answer_about_an_image_is_continued(cold: GenerationEngine) -> None:
    """It is continued as the model itself would have gone on."""
    asked = see("What is @, or @?", CAT, DOG)
    words = "It is a"
    last = {"role": "assistant", "content": words}
    job = replace(asked, messages=[*asked.messages, last], continues=True)
    [params], [before] = cold.prepare(job), cold.prepare(asked)
    said = cold.tokens.encode(words)
    assert list(params.prompt) == [*before.prompt, *said]
    assert [span.start for span in params.images] == [span.start for span in before.images]
    assert ids(alone(cold, job))


def test_an_image_in_a_continued_answer_or_behind_it_is_refused(cold: GenerationEngine) -> None:
    asked = see("What is @?", CAT)
    word = asked.images[0].word
    turns = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": f"a {word}"}]
    with pytest.raises(BadRequest, match=r"messages\[0\]"):
        cold.prepare(replace(asked, messages=turns, continues=True))


@pytest.mark.parametrize("token", [-1, 320, FIRST_IMAGE_ID, FIRST_IMAGE_ID + 5, 1 << 70])
def test_ids_of_no_vocabulary_in_a_bare_prompt_are_refused(
    cold: GenerationEngine, token: int
) -> None:
    """With images too, which a bare prompt cannot have."""
    for job in (bare([5, token, 6]), replace(see("@", CAT), prompt=[5, token], messages=[])):
        with pytest.raises(BadRequest, match="Token ids are 0 to 319"):
            cold.prepare(job)


def test_images_count_towards_the_context(folder: Path, cold: GenerationEngine) -> None:
    limit = cold.facts.max_context
    many = see("@" * 70, *[LARGE] * 70)
    with pytest.raises(ContextLengthExceeded) as refused:
        cold.prepare(many)
    assert str(limit) in refused.value.message.replace(",", "")


def test_the_end_of_a_prompt_is_decoded_for_a_reader_of_answers(cold: GenerationEngine) -> None:
    """The ids of images, which are of no vocabulary, are left out."""

    class Reader:
        problem = None

        def read(self, params: Any, text: str, prefix: str, calls: Any, *, is_cut: bool) -> Any:
            return (), (prefix, text)

    setup: Any = replace(cold._setup, reader=Reader())  # type: ignore[arg-type]
    cold._setup, before = setup, cold._setup
    try:
        [params] = cold.prepare(see("What is @?", CAT))
        _, said = cold.read_answer(params, "a cat", False)
    finally:
        cold._setup = before
    assert said is not None
    assert "What is <|vision_start|>" in said[0]
    assert said[0].endswith("?<|im_end|><|assistant|>")


def test_images_beyond_the_context_are_refused_before_any_is_decoded() -> None:
    asked: list[str] = []

    def counting(request: Mapping[str, Any], key: bytes) -> tuple[str, Any]:
        asked.append(request["kind"])
        return paint(request, key)

    formats = replace(FORMAT, sandbox=counting, max_context=11)
    with pytest.raises(ContextLengthExceeded) as refused:
        formats.read([image(CAT), image(DOG)])
    assert (refused.value.tokens, asked) == (12, ["measure", "measure"])


def test_an_image_that_stands_twice_is_decoded_once() -> None:
    asked: list[str] = []

    def counting(request: Mapping[str, Any], key: bytes) -> tuple[str, Any]:
        asked.append(request["kind"])
        return paint(request, key)

    one, other = replace(FORMAT, sandbox=counting).read([image(COW), image(COW)])
    assert one is other
    assert asked.count("decode") == 1
