"""The images that the load tool sends."""

import io

import orjson
from PIL import Image

from gateway.bench.pictures import draw_png
from gateway.bench.requests import chat


def test_images_are_the_same_again_and_no_two_alike() -> None:
    drawn = [draw_png(seed, 64, 96) for seed in (1, 1, 2)]
    first, again, other = (Image.open(io.BytesIO(each)).convert("RGB") for each in drawn)
    assert first.size == (64, 96)
    assert first.tobytes() == again.tobytes()
    squares = [(x, y) for x in (0, 32) for y in (0, 32, 64)]
    for x, y in squares:
        assert first.getpixel((x, y)) == first.getpixel((x + 31, y + 31))
        assert first.getpixel((x, y)) != other.getpixel((x, y))
    assert len({first.getpixel(place) for place in squares}) == len(squares)


def test_an_image_needs_no_compression_of_its_own() -> None:
    """Drawn in milliseconds, images would delay the load tool's own clock."""
    one, other = (draw_png(seed, 64, 96) for seed in (1, 2))
    pixels = one.index(b"IDAT")
    assert one[pixels:] == other[pixels:]
    assert len(one) == len(other)


def test_images_stand_before_the_prompt() -> None:
    body = orjson.loads(chat("m", "What?", max_tokens=1, images=[b"PNG", b"x"]).body)
    urls = [part["image_url"]["url"] for part in body["messages"][0]["content"][:2]]
    assert urls == ["data:image/png;base64,UE5H", "data:image/png;base64,eA=="]
    assert body["messages"][0]["content"][2:] == [{"type": "text", "text": "What?"}]
