"""The images that the load tool sends."""

import io

import orjson
from PIL import Image

from gateway.bench.pictures import draw_png
from gateway.bench.requests import chat


def test_images_are_the_same_again_and_no_two_alike() -> None:
    drawn = [draw_png(seed, 64, 96) for seed in (1, 1, 2)]
    first, again, other = (Image.open(io.BytesIO(each)) for each in drawn)
    assert (first.size, first.mode) == ((64, 96), "RGB")
    assert first.tobytes() == again.tobytes() != other.tobytes()


def test_images_stand_before_the_prompt() -> None:
    body = orjson.loads(chat("m", "What?", max_tokens=1, images=[b"PNG", b"x"]).body)
    urls = [part["image_url"]["url"] for part in body["messages"][0]["content"][:2]]
    assert urls == ["data:image/png;base64,UE5H", "data:image/png;base64,eA=="]
    assert body["messages"][0]["content"][2:] == [{"type": "text", "text": "What?"}]
