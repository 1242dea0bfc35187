"""Files that cameras, browsers and tools write are shown as their viewers show them."""

import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from gateway.engine.vision.pictures import decode, measure
from gateway.errors import BadRequest, GatewayError, Overloaded, Unavailable
from gateway.serving.sandbox import Sandbox
from tests.engine.vision.picture_files import (
    chunk,
    interlaced_png,
    noise,
    png,
    saved,
    with_orientation,
    zeros,
)

PLACE = "messages[0].content[1]"
RGB = noise()
PIXELS = np.asarray(RGB)
CLEAR = Image.merge("RGBA", (*RGB.split(), Image.linear_gradient("L").resize(RGB.size)))


def read(box: Sandbox, data: bytes) -> NDArray[np.int64]:
    """Decode a file to its own size."""
    return decode(box, data, *measure(box, data, PLACE), "bicubic", PLACE).astype(np.int64)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP"])
def test_each_format_gives_the_pixels_that_were_saved(box: Sandbox, kind: str) -> None:
    picture = RGB.quantize(200) if kind == "GIF" else RGB
    options = {"lossless": True} if kind == "WEBP" else {}
    assert measure(box, saved(picture, kind, **options), PLACE) == (64, 48)
    shown = read(box, saved(picture, kind, **options))
    assert np.array_equal(shown, np.asarray(picture.convert("RGB")))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
def test_an_animation_is_its_first_frame(box: Sandbox, kind: str) -> None:
    first, *rest = (Image.new("RGB", (40, 30), name) for name in ("red", "lime", "blue"))
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(first, kind, save_all=True, append_images=rest, duration=50, **options)
    assert (read(box, data) == [255, 0, 0]).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_exif_says(box: Sandbox, orientation: int) -> None:
    turned = [
        PIXELS,
        PIXELS[:, ::-1],
        PIXELS[::-1, ::-1],
        PIXELS[::-1],
        PIXELS.transpose(1, 0, 2),
        np.rot90(PIXELS, -1),
        PIXELS[::-1, ::-1].transpose(1, 0, 2),
        np.rot90(PIXELS),
    ][orientation - 1]
    for kind in ("PNG", "WEBP"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = saved(RGB, kind, exif=with_orientation(orientation), **options)
        assert np.array_equal(read(box, data), turned)
    photo = saved(RGB, "JPEG", exif=with_orientation(orientation))
    assert measure(box, photo, PLACE) == turned.shape[1::-1]


def test_exif_after_the_pixels_counts_too(box: Sandbox) -> None:
    """PNG allows it, and some tools write it there."""
    data = saved(RGB, "PNG")
    exif = with_orientation(6).tobytes().removeprefix(b"Exif\0\0")
    late = data[:-12] + chunk(b"eXIf", exif) + data[-12:]
    assert measure(box, late, PLACE) == (48, 64)
    assert np.array_equal(read(box, late), np.rot90(PIXELS, -1))


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_transparent_pixels_are_shown_over_white(box: Sandbox, kind: str) -> None:
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    alpha = np.asarray(CLEAR)[..., 3:].astype(np.int64)
    expected = np.round((PIXELS * alpha + 255 * (255 - alpha)) / 255)
    assert np.array_equal(read(box, saved(CLEAR, kind, **options)), expected)


@pytest.mark.parametrize(
    ("mode", "clear", "solid"),
    [
        ("L", 7, 70),
        ("RGB", (9, 8, 7), (90, 80, 70)),
        ("P", 7, 70),
        ("LA", (7, 0), (70, 255)),
        ("1", 0, 1),
    ],
)
def test_a_transparent_colour_is_white_in_each_mode(
    box: Sandbox, mode: str, clear: Any, solid: Any
) -> None:
    picture = Image.new(mode, (20, 10), solid)
    if mode == "P":
        picture.putpalette([each for level in range(256) for each in (level, level, level)])
    picture.paste(clear, (0, 0, 10, 10))
    options = {} if mode == "LA" else {"transparency": clear}
    shown = read(box, saved(picture, "PNG", **options))
    assert (shown[:, :10] == 255).all()
    assert (shown[:, 10:] == {"RGB": (90, 80, 70), "1": 255}.get(mode, 70)).all()


def test_a_transparent_colour_of_16_bits_is_that_one_alone(box: Sandbox) -> None:
    levels = np.full((10, 20), 7 << 8 | 9, np.uint16)
    levels[:, :10] = 7 << 8
    shown = read(box, saved(Image.fromarray(levels), "PNG", transparency=7 << 8))
    assert (shown[:, :10] == 255).all()
    assert (shown[:, 10:] == 7).all()


def test_16_bits_are_scaled(box: Sandbox) -> None:
    levels = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    shown = read(box, saved(Image.fromarray(levels), "PNG"))
    assert np.array_equal(shown, np.stack([levels >> 8] * 3, -1))


def test_an_interlaced_png_is_put_together(box: Sandbox) -> None:
    assert np.array_equal(read(box, interlaced_png(PIXELS)), PIXELS)


def test_cmyk_is_converted(box: Sandbox) -> None:
    inks = Image.new("CMYK", (32, 32), (0, 255, 255, 0))
    shown = read(box, saved(inks, "JPEG", quality=95))
    assert np.abs(shown - [255, 0, 0]).max() <= 6


def test_a_gray_jpeg_and_one_with_a_profile(box: Sandbox) -> None:
    """Colour profiles are ignored."""
    assert (read(box, saved(Image.new("L", (16, 16), 90), "JPEG")) == 90).all()
    profile = saved(RGB, "PNG", icc_profile=b"profile" * 9000)
    assert np.array_equal(read(box, profile), PIXELS)


def test_a_bmp_may_run_from_top_to_bottom(box: Sandbox) -> None:
    data = bytearray(saved(RGB, "BMP"))
    data[22:26] = struct.pack("<i", -48)
    assert np.array_equal(read(box, bytes(data)), PIXELS[::-1])


@pytest.mark.parametrize(
    "resample", ["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
)
def test_pixels_are_resampled_by_the_filter_of_that_name(box: Sandbox, resample: str) -> None:
    shown = decode(box, saved(RGB, "PNG"), 32, 96, resample, PLACE)
    expected = np.asarray(RGB.resize((32, 96), Image.Resampling[resample.upper()]))
    assert np.array_equal(shown, expected)
    assert not shown.flags.writeable


def test_a_large_file_and_its_pixels_arrive_whole(box: Sandbox) -> None:
    large = noise(2000, 1500)
    assert np.array_equal(read(box, saved(large, "BMP")), np.asarray(large))


def test_the_place_is_named(box: Sandbox) -> None:
    with pytest.raises(BadRequest, match="none of PNG, JPEG, WEBP, GIF and BMP") as raised:
        measure(box, b"<svg/>", PLACE)
    assert PLACE in raised.value.message
    assert raised.value.param == PLACE


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (("busy", "another slow call is running"), Overloaded),
        (("slow", "it waited"), Unavailable),
        (("killed", "the system ended it"), Unavailable),
        (("late", "it took over 5 seconds"), BadRequest),
        (("died", "SIGSEGV"), BadRequest),
        (("large", "it needs more memory"), BadRequest),
        (("measured", [1 << 40, 1 << 40]), BadRequest),
        (("measured", [0, 4]), BadRequest),
        (("measured", [8.0, 8]), BadRequest),
        (("measured", b"8888"), BadRequest),
        (("measured", None), BadRequest),
    ],
)
def test_each_outcome_is_an_error_of_its_own(
    outcome: tuple[str, Any], error: type[GatewayError]
) -> None:
    with pytest.raises(error):
        measure(lambda request, key: outcome, b"", PLACE)


@pytest.mark.parametrize("value", [None, [0] * 12, "x" * 12, b"x" * 11, b"x" * 13])
def test_pixels_of_another_number_are_no_answer(value: object) -> None:
    with pytest.raises(BadRequest, match="invalid answer"):
        decode(lambda request, key: ("decoded", value), b"", 2, 2, "box", PLACE)


def test_a_file_is_known_by_its_content_alone() -> None:
    """Once it has killed a process it is not tried again, in whatever request or size."""
    keys = []

    def note(request: Mapping[str, Any], key: bytes) -> tuple[str, Any]:
        keys.append(key)
        return "died", "SIGSEGV"

    for data in (b"a", b"b"):
        with pytest.raises(BadRequest):
            measure(note, data, PLACE)
        with pytest.raises(BadRequest):
            decode(note, data, 8, 8, "box", PLACE)
    assert keys[0] == keys[1] != keys[2] == keys[3]


def test_two_threads_have_their_own_pixels(box: Sandbox) -> None:
    def shows_its_own(seed: int) -> bool:
        picture = noise(200, 100, seed)
        return np.array_equal(read(box, saved(picture, "PNG")), np.asarray(picture))

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(shows_its_own, range(15)))


def test_the_largest_image_is_decoded(box: Sandbox) -> None:
    """64 million pixels have room in the mode that needs most of it, and a turn."""
    exif = chunk(b"eXIf", with_orientation(6).tobytes().removeprefix(b"Exif\0\0"))
    data = png(8000, 8000, zeros(8000, 8000, 4), colour=6, more=exif)
    assert measure(box, data, PLACE) == (8000, 8000)
    assert (decode(box, data, 448, 448, "bicubic", PLACE) == 255).all()
