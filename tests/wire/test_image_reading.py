"""Images for a model that reads them: shapes that are read, their words, their limits."""

import base64
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.errors import BadRequest
from gateway.jobs.chat import GenerateJob, Sampling
from gateway.jobs.images import ImageInput
from gateway.wire import anthropic, chat, images, responses, tokenization
from gateway.wire.images import ImageLimits, ImageReader
from gateway.wire.validation import read_request
from tests.fakes import caller

DATA = b"\x89PNG not decoded here"
BASE64 = base64.b64encode(DATA).decode()
URL = f"data:image/png;base64,{BASE64}"
CALL = {"id": "c", "function": {"name": "see", "arguments": "{}"}}


def chat_job(turns: Any, reader: ImageReader, **more: Any) -> GenerateJob:
    request = _read(chat.ChatRequest, {"messages": turns, **more})
    return chat.to_job(
        request,
        caller(),
        Sampling(),
        max_tokens=9,
        template_args={},
        max_chars=5000,
        images=reader,
    )


def message_job(turns: Any, reader: ImageReader, **more: Any) -> GenerateJob:
    request = _read(anthropic.MessagesRequest, {"messages": turns, "max_tokens": 9, **more})
    return anthropic.to_job(
        request, caller(), Sampling(), template_args={}, max_chars=5000, images=reader
    )


def response_job(turns: Any, reader: ImageReader, **more: Any) -> GenerateJob:
    request = _read(responses.ResponsesRequest, {"input": turns, **more})
    return responses.to_job(
        request,
        caller(),
        Sampling(),
        items=request.input,
        max_tokens=9,
        template_args={},
        max_chars=5000,
        images=reader,
    )


def tokenize_job(turns: Any, reader: ImageReader) -> GenerateJob:
    request = _read(tokenization.TokenizeRequest, {"messages": turns})
    return tokenization.to_job(request, caller(), max_chars=5000, images=reader)


def _read(shape: Any, fields: Mapping[str, Any]) -> Any:
    return read_request(orjson.dumps({"model": "m", **fields}), shape, strict=True).request


def reader(**limits: int) -> ImageReader:
    return ImageReader(ImageLimits(**{"images": 3, "nbytes": 100, **limits}))


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


def tool(*parts: Any) -> list[Any]:
    call = {"role": "assistant", "tool_calls": [CALL]}
    return [*user(TEXT), call, {"role": "tool", "tool_call_id": "c", "content": list(parts)}]


def output(*parts: Any) -> list[Any]:
    call = {"type": "function_call", "call_id": "c", "name": "see", "arguments": "{}"}
    return [call, {"type": "function_call_output", "call_id": "c", "output": list(parts)}]


def result(*parts: Any) -> list[Any]:
    block = {"type": "tool_result", "tool_use_id": "c", "content": list(parts)}
    call = {"type": "tool_use", "id": "c", "name": "see", "input": {}}
    return [*user(TEXT), {"role": "assistant", "content": [call]}, *user(block)]


def as_role(role: str) -> Callable[..., list[Any]]:
    return lambda *parts: [*user(TEXT), {"role": role, "content": list(parts)}, *user(TEXT)]


def image_url(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def input_image(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, **more}


def block(data: Any, kind: str = "base64", **more: Any) -> dict[str, Any]:
    return {"type": "image", "source": {"type": kind, "media_type": "x/y", "data": data, **more}}


TEXT = {"type": "text", "text": "look"}
Shape = tuple[Callable[..., GenerateJob], list[Any], str, str]
# A job, its turns, the image's place and its detail.
READ: dict[str, Shape] = {
    "chat": (chat_job, user(image_url(URL)), "messages[0].content[0]", "auto"),
    "chat, low": (chat_job, user(image_url(URL, detail="low")), "messages[0].content[0]", "low"),
    "chat, high": (chat_job, user(image_url(URL, detail="high")), "messages[0].content[0]", "high"),
    "chat, null": (chat_job, user(image_url(URL, detail=None)), "messages[0].content[0]", "auto"),
    "chat, a text": (
        chat_job, user(TEXT, {"type": "image_url", "image_url": URL}),
        "messages[0].content[1]", "auto",
    ),
    "chat, a text and its detail": (
        chat_job, user({"type": "image_url", "image_url": URL, "detail": "low"}),
        "messages[0].content[0]", "low",
    ),
    "chat, Responses' part": (
        chat_job, user(TEXT, TEXT, input_image(URL, detail="original")),
        "messages[0].content[2]", "high",
    ),
    "chat, a tool": (chat_job, tool(TEXT, image_url(URL)), "messages[2].content[1]", "auto"),
    "chat, other type": (
        chat_job, user(image_url(f"data:text/html;charset=x;base64,{BASE64}")),
        "messages[0].content[0]", "auto",
    ),
    "chat, no type": (
        chat_job, user(image_url(f"data:;base64,{BASE64}")), "messages[0].content[0]", "auto",
    ),
    "chat, capitals": (
        chat_job, user(image_url(f"DATA:image/PNG;BASE64,{BASE64}")),
        "messages[0].content[0]", "auto",
    ),
    "chat, no padding": (
        chat_job, user(image_url(URL.rstrip("="))), "messages[0].content[0]", "auto",
    ),
    "chat, lines": (
        chat_job, user(image_url(f"data:;base64,\r\n {BASE64[:9]}\n{BASE64[9:]}\t\n")),
        "messages[0].content[0]", "auto",
    ),
    "tokenize": (tokenize_job, user(TEXT, image_url(URL)), "messages[0].content[1]", "auto"),
    "responses": (response_job, user(input_image(URL)), "input[0].content[0]", "auto"),
    "responses, low": (
        response_job, user("look", input_image(URL, detail="low")), "input[0].content[1]", "low",
    ),
    "responses, original": (
        response_job, user(input_image(URL, detail="original")), "input[0].content[0]", "high",
    ),
    "responses, chat's part": (
        response_job, user(image_url(URL, detail="high")), "input[0].content[0]", "high",
    ),
    "responses, no file": (
        response_job, user(input_image(URL, file_id=None)), "input[0].content[0]", "auto",
    ),
    "responses, an output": (
        response_job, output("look", input_image(URL)), "input[1].output[1]", "auto",
    ),
    "messages": (message_job, user(block(BASE64)), "messages[0].content[0]", "auto"),
    "messages, cached": (
        message_job, user(TEXT, {**block(BASE64), "cache_control": {"type": "ephemeral"}}),
        "messages[0].content[1]", "auto",
    ),
    "messages, lines": (message_job, user(block(f"{BASE64}\n")), "messages[0].content[0]", "auto"),
    "messages, a result": (
        message_job, result(TEXT, block(BASE64)), "messages[2].content[0].content[1]", "auto",
    ),
    "messages, after a result": (
        message_job, [*result(TEXT)[:2], *user(*result(TEXT)[2]["content"], block(BASE64))],
        "messages[2].content[1]", "auto",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("job", "turns", "place", "detail"), READ.values(), ids=READ)
def test_an_image_is_read(job: Any, turns: Any, place: str, detail: str) -> None:
    made = job(turns, reader())
    (image,) = made.images
    assert (image.data, image.place, image.detail) == (DATA, place, detail)
    assert image.kind in ("image", "image_url", "input_image")
    assert sum(turn["content"].count(image.word) for turn in made.messages) == 1
    assert DATA.hex() not in repr(image)
    with pytest.raises(BadRequest, match="this model reads text"):
        job(turns, ImageReader())


ADDRESS, FILE, BASE, NONE = "no addresses", "no files", "not base64", "no data"
PLACE = "messages of the user and results of tools"
# A job, its turns, the place in the error, and some of its words.
REFUSED: dict[str, tuple[Callable[..., GenerateJob], list[Any], str, str]] = {
    **{
        f"chat, {url[:40]}": (
            chat_job, user(TEXT, image_url(url)), "messages[0].content[1]", ADDRESS,
        )
        for url in (
            "http://127.0.0.1:1/a.png", "https://x.org/a.png", "file:///etc/passwd", "blob:abc",
            "/etc/passwd", "a.png", "", " ", "ftp://x/y", "//x/y.png", "data:", "data:,hello",
            "data:image/png,abc", "data:image/svg+xml;utf8,<svg/>", "data:image/png;base64",
            f"http://x/?{URL}", BASE64, "data:" + "a" * 2000 + ";base64,AAAA",
        )
    },
    "responses, an address": (
        response_job, user(input_image("https://x/y")), "input[0].content[0]", ADDRESS,
    ),
    "messages, an address": (
        message_job, user(block(None, "url", url="https://x/y")), "messages[0].content[0]", ADDRESS,
    ),
    "messages, an address that is data": (
        message_job, user(block(None, "url", url=URL)), "messages[0].content[0]", ADDRESS,
    ),
    "responses, a file": (
        response_job, user({"type": "input_image", "file_id": "f"}), "input[0].content[0]", FILE,
    ),
    "messages, a file": (
        message_job, user(block(None, "file", file_id="f")), "messages[0].content[0]", FILE,
    ),
    "messages, a file of a tool": (
        message_job, result(block(None, "file", file_id="f")),
        "messages[2].content[0].content[0]", FILE,
    ),
    "chat, a word for detail": (
        chat_job, user(image_url(URL, detail="max")), "messages[0].content[0]", "'detail'",
    ),
    "chat, a list for detail": (
        chat_job, user(image_url(URL, detail=["low"])), "messages[0].content[0]", "'detail'",
    ),
    "chat, a number": (chat_job, user(image_url(5)), "messages[0].content[0]", NONE),
    "chat, nothing": (chat_job, user({"type": "image_url"}), "messages[0].content[0]", NONE),
    "chat, no base64": (chat_job, user(image_url("data:;base64,")), "messages[0].content[0]", NONE),
    "responses, null": (response_job, user(input_image(None)), "input[0].content[0]", NONE),
    "messages, no source": (message_job, user({"type": "image"}), "messages[0].content[0]", NONE),
    "messages, no data": (message_job, user(block("")), "messages[0].content[0]", NONE),
    "messages, another source": (
        message_job, user(block(BASE64, "hex")), "messages[0].content[0]", NONE,
    ),
    "messages, a data: URL as base64": (
        message_job, user(block(URL)), "messages[0].content[0]", BASE,
    ),
    **{
        f"base64 {data!r}": (message_job, user(block(data)), "messages[0].content[0]", BASE)
        for data in ("%%", "AAA-", "AA_A", "A", "AAAAA", "AA=A", "AA===", "=", "====", "A=", "é",
                     "AA==AAAA", "AAAA=", "A\0AA", "AAAAA\u200b", "AA%3D%3D", "\u2028AAAA")
    },
    **{
        f"chat, {role}": (chat_job, as_role(role)(image_url(URL)), "messages[1].content[0]", PLACE)
        for role in ("system", "developer", "assistant")
    },
    **{
        f"responses, {role}": (
            response_job, as_role(role)(input_image(URL)), "input[1].content[0]", PLACE,
        )
        for role in ("system", "developer", "assistant")
    },
    **{
        f"messages, {role}": (
            message_job, as_role(role)(block(BASE64)), "messages[1].content[0]", PLACE,
        )
        for role in ("system", "assistant")
    },
    "responses, reasoning": (
        response_job, [{"type": "reasoning", "content": [input_image(URL)]}],
        "input[0].content[0]", PLACE,
    ),
    "messages, a document": (
        message_job,
        user({"type": "document", "source": {"type": "content", "content": [block(BASE64)]}}),
        "messages[0].content[0].source.content[0]", PLACE,
    ),
    "messages, a summary": (
        message_job,
        [*user(TEXT), {
            "role": "assistant", "content": [{"type": "compaction", "content": [block(BASE64)]}],
        }],
        "messages[1].content[0].content[0]", PLACE,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("job", "turns", "place", "words"), REFUSED.values(), ids=REFUSED)
def test_an_image_is_refused_by_its_place(job: Any, turns: Any, place: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as refused:
        job(turns, reader())
    assert refused.value.param == place
    assert str(refused.value).startswith(f"Invalid '{place}': Could not process image")
    assert len(str(refused.value)) < 400
    with pytest.raises(BadRequest, match="this model reads text"):
        job(turns, ImageReader())


def test_a_system_prompts_image_is_refused() -> None:
    with pytest.raises(BadRequest, match=PLACE) as refused:
        message_job(user(TEXT), reader(), system=[block(BASE64)])
    assert refused.value.param == "system[0]"


@pytest.mark.parametrize("kind", ["image_url", "input_image"])
def test_messages_know_images_by_one_name(kind: str) -> None:
    for turns in (user({"type": kind, "image_url": URL}), result({"type": kind, "image_url": URL})):
        with pytest.raises(BadRequest, match=f"type '{kind}' is not served"):
            message_job(turns, reader())


def test_images_are_in_order_and_their_words_stand_where_they_stood() -> None:
    urls = [f"data:;base64,{base64.b64encode(bytes([i])).decode()}" for i in range(3)]
    turns = [
        *user({"type": "text", "text": "a "}, image_url(urls[0]), image_url(urls[1]), TEXT),
        {"role": "assistant", "content": "so"},
        *user(image_url(urls[2])),
        *user({"type": "text", "text": "b"}),
    ]
    job = chat_job(turns, reader())
    first, second, third = (image.word for image in job.images)
    assert [image.data for image in job.images] == [b"\0", b"\1", b"\2"]
    texts = [turn["content"] for turn in job.messages]
    assert texts == [f"a {first}{second}look", "so", f"{third}\n\nb"]
    assert [image.place[:11] for image in job.images] == ["messages[0]"] * 2 + ["messages[2]"]


def test_blocks_have_an_empty_line_between_texts_alone() -> None:
    turns = user(TEXT, TEXT, block(BASE64), block(BASE64), TEXT)
    job = message_job([*turns, *result(TEXT, block(BASE64), TEXT)[1:]], reader())
    first, second, third = (image.word for image in job.images)
    assert job.messages[0]["content"] == f"look\n\nlook{first}{second}look"
    assert job.messages[2]["content"] == f"look{third}look"


def test_no_word_is_known_before_nor_the_beginning_of_another() -> None:
    many = reader(images=120)
    job = chat_job(user(*[image_url(URL)] * 120), many)
    words = [image.word for image in job.images]
    assert all(re.fullmatch(r"image[0-9a-f]{32}\d+z", word) for word in words)
    assert not [(a, b) for a in words for b in words if a != b and b.startswith(a)]
    again = chat_job(user({"type": "text", "text": words[0]}, image_url(URL)), reader())
    (image,) = again.images
    assert image.word not in words
    assert again.messages[0]["content"] == words[0] + image.word


@pytest.mark.parametrize("count", [3, 4, 50])
def test_images_are_counted_before_any_is_decoded(count: int) -> None:
    """The last one may be broken: the limit is what is told."""
    parts = [image_url(URL)] * (count - 1)
    if count == 3:
        assert len(chat_job(user(*parts, image_url(URL)), reader()).images) == 3
        return
    with pytest.raises(BadRequest, match="at most 3 images") as refused:
        chat_job(user(image_url("data:;base64,%"), *parts), reader())
    assert refused.value.param == "messages[0].content[3]"


@pytest.mark.parametrize("form", ["{}", " {}\n", "{}==", "\n\n{}= \n="])
def test_bytes_are_counted_exactly(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whitespace and padding are not counted, and an image that is too large is not decoded."""

    def sized(nbytes: int) -> Any:
        digits = base64.b64encode(bytes(nbytes)).decode().rstrip("=")
        return user(image_url("data:;base64," + form.format(digits)))

    size = 100 if "=" in form else 99  # 100 bytes take two signs of padding, 99 none
    limit = reader(nbytes=size)
    assert [len(image.data) for image in chat_job(sized(size), limit).images] == [size]
    monkeypatch.setattr(images, "a2b_base64", None)
    with pytest.raises(BadRequest, match=f"{size + 3} bytes, and at most {size} are read"):
        chat_job(sized(size + 3), reader(nbytes=size))


def test_a_long_image_is_decoded_in_slices_as_a_whole() -> None:
    for size in (3 << 18, (3 << 18) + 1, (3 << 19) - 1, 3 << 19):
        data = bytes(range(256)) * (size // 256) + bytes(size % 256)
        url = f"data:;base64,{base64.b64encode(data).decode()}"
        (image,) = chat_job(user(image_url(url)), reader(nbytes=size)).images
        assert image.data == data
    digits = "A" * (1 << 20)
    for broken in (f"{digits[:-2]}=={digits}", f"{digits[:-1]}={digits}"):
        with pytest.raises(BadRequest, match=BASE):
            chat_job(user(image_url(f"data:;base64,{broken}")), reader(nbytes=1 << 22))


def test_a_text_that_stands_many_times_is_decoded_once() -> None:
    """A kept item may be referred to many times."""
    (item,) = responses.ResponsesRequest.model_validate(
        {"model": "m", "input": user(input_image(URL))}
    ).input
    request = _read(responses.ResponsesRequest, {"input": "hi"})
    job = responses.to_job(
        request,
        caller(),
        Sampling(),
        items=[item, item, *request.input],
        max_tokens=9,
        template_args={},
        max_chars=5000,
        images=reader(),
    )
    first, second = job.images
    assert first.data is second.data
    assert first.word != second.word
    assert (first.place, second.place) == ("input[-2].content[0]", "input[-1].content[0]")


def test_the_length_of_texts_is_that_of_texts_alone() -> None:
    data = base64.b64encode(bytes(60_000)).decode()
    parts = [image_url(f"data:;base64,{data}")] * 3
    big = reader(nbytes=60_000)
    assert len(chat_job(user(*parts, {"type": "text", "text": "x" * 1000}), big).images) == 3
    with pytest.raises(BadRequest, match="longer than 5000 characters"):
        chat_job(user({"type": "text", "text": "x" * 5500}), reader())


def image_or_error(job: Callable[..., GenerateJob], turns: list[Any]) -> ImageInput | BadRequest:
    try:
        (image,) = job(turns, reader()).images
    except BadRequest as error:
        return error
    return image


BYTES = st.binary(min_size=1, max_size=100)
NOISE = st.text(st.sampled_from("Aa9+/=-_ \n\t%é\0,;"), max_size=40)


@given(data=BYTES, breaks=st.lists(st.integers(0, 130), max_size=5), padded=st.booleans())
def test_what_is_encoded_is_read(data: bytes, breaks: list[int], padded: bool) -> None:
    text = base64.b64encode(data).decode()
    text = text if padded else text.rstrip("=")
    for place in breaks:
        text = text[:place] + " \n"[place % 2] + text[place:]
    (image,) = message_job(user(block(text)), reader()).images
    assert image.data == data


@given(text=NOISE)
@example("AA=")
@example("AAA=\n=")
def test_what_is_not_base64_is_a_400(text: str) -> None:
    """Whatever is read decodes again to the same digits."""
    image = image_or_error(message_job, user(block(text)))
    if isinstance(image, BadRequest):
        assert image.param == "messages[0].content[0]"
        return
    digits = re.sub(r"[ \t\n\v\f\r]", "", text).rstrip("=")
    assert re.fullmatch(r"[A-Za-z0-9+/]+", digits)
    assert len(image.data) == len(digits) * 3 // 4


SCHEMES = ("data:", "DATA:", "http://", "file:", "", "data:image/png;base64,", "data:;base64")


@given(url=st.builds(str.__add__, st.sampled_from(SCHEMES), NOISE | st.text(max_size=40)))
def test_no_url_is_more_than_an_image_or_a_400(url: str) -> None:
    image = image_or_error(chat_job, user(image_url(url)))
    if isinstance(image, BadRequest):
        assert image.param == "messages[0].content[0]"
        return
    assert url.lower().startswith("data:")
    assert ";base64," in url.lower()
    assert image.data


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.sampled_from([URL, "low", "base64", ""]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["url", "detail", "type", "data", "image_url", "file_id"]), inner
        )
    ),
    max_leaves=6,
)


@pytest.mark.generator(weight=0.3)
@given(fields=st.dictionaries(st.sampled_from(["image_url", "detail", "file_id", "source"]), JSON))
def test_no_shape_is_more_than_an_image_or_a_400(fields: dict[str, Any]) -> None:
    for kind, job in (("image_url", chat_job), ("input_image", response_job)):
        image = image_or_error(job, user({"type": kind, **fields}))
        assert isinstance(image, BadRequest) or image.data


LOGGED: dict[str, Any] = {
    "a part": image_url(URL, detail="low"),
    "a text": {"type": "image_url", "image_url": URL},
    "a source": block(BASE64),
    "another field": {"type": "image_url", "image": {"inner": [BASE64]}},
    "an output": {"type": "computer_call_output", "output": {"type": "x", "image_url": URL}},
    "a file": {"type": "input_file", "file_data": URL},
    "a url": {"type": "else", "url": URL},
}


@pytest.mark.parametrize("given", LOGGED.values(), ids=LOGGED)
def test_a_log_shows_a_size_and_a_tag(given: Any) -> None:
    fields = {"messages": [{"role": "user", "content": [TEXT, {"a": [given]}]}], "model": "m"}
    shown = images.hide_images(fields)
    text = orjson.dumps(shown).decode()
    assert BASE64 not in text
    (found,) = re.findall(r"<image (\d+) bytes, tag ([0-9a-f]{8})>", text)
    assert found[0] == str(len(DATA))
    assert images.hide_images(fields) == shown
    other = base64.b64encode(DATA + b"!").decode()
    changed = orjson.loads(orjson.dumps(fields).decode().replace(BASE64, other))
    assert found[1] not in orjson.dumps(images.hide_images(changed)).decode()


def test_a_log_shows_texts_and_thousands() -> None:
    data = base64.b64encode(bytes(1_204_113)).decode()
    fields = {"messages": [TEXT, {"role": "user", "content": "data: 5"}], "n": 3, "x": None}
    assert images.hide_images(fields) == fields
    (shown,) = images.hide_images([block(data)])
    assert shown.startswith("<image 1,204,113 bytes, tag ")


WRITTEN: list[Callable[[bytes], str]] = [
    lambda data: base64.b64encode(data).decode(),
    lambda data: base64.urlsafe_b64encode(data).decode().rstrip("="),
    lambda data: base64.encodebytes(data).decode(),
    lambda data: base64.encodebytes(data).decode().replace("\n", "\r\n  "),
    lambda data: orjson.dumps(base64.encodebytes(data).decode()).decode(),
    lambda data: base64.b64encode(data).decode().replace("/", "\\/").replace("+", "\\u002B"),
    lambda data: f"Listen: data:audio/wav;base64,{base64.b64encode(data).decode()} Well?",
]
PLACES: list[Callable[[str], Any]] = [
    lambda text: text,
    lambda text: {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}},
    lambda text: {"type": "new", "parts": [["a", {"b": text}], 3]},
    lambda text: {"type": "new", text: None},
    lambda text: {"tool_calls": [{"function": {"arguments": orjson.dumps({"a": text}).decode()}}]},
]


def _texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from _texts_of([*value, *value.values()])
    elif isinstance(value, list):
        for each in value:
            yield from _texts_of(each)
    elif isinstance(value, str):
        yield value


@pytest.mark.generator(weight=0.2)
@given(
    data=st.binary(min_size=400, max_size=3000),
    write=st.sampled_from(WRITTEN),
    place=st.sampled_from(PLACES),
)
def test_a_log_shows_at_most_some_hundred_letters_of_any_base64(
    data: bytes, write: Callable[[bytes], str], place: Callable[[str], Any]
) -> None:
    """A part of a type that the gateway has never heard of may hold a film."""
    written = write(data)
    shown = images.hide_images({"messages": [{"role": "user", "content": [place(written)]}]})
    for text in _texts_of(shown):
        assert len(text) < 400
    assert "base64 " in orjson.dumps(shown).decode()


def test_a_log_shows_long_words_paths_and_hashes() -> None:
    """Three hashes in a row are not base64 yet, nor is the longest name of a file."""
    path = "/".join(["src"] * 35)
    texts = [path, "\n".join(["0123456789abcdef" * 4] * 3), "x" * 159, "word " * 999]
    assert images.hide_images(texts) == texts


@pytest.mark.parametrize(
    ("content", "place", "words"),
    [
        ([TEXT, image_url(URL)], "messages[1].content[1]", PLACE),
        ([image_url(URL)], "messages[1]", "a message that has text"),
        ([{"type": "input_audio"}], "messages[1]", "a message that has text"),
    ],
)
def test_an_answer_is_not_continued_from_an_image(content: Any, place: str, words: str) -> None:
    turns = [*user(TEXT), {"role": "assistant", "content": content}]
    asked = {"continue_final_message": True, "add_generation_prompt": False}
    with pytest.raises(BadRequest, match=re.escape(f"Invalid '{place}'")) as refused:
        chat_job(turns, reader(), **asked)
    assert words.replace("a message", "an assistant's message") in str(refused.value)


def test_an_answer_is_continued_from_a_refusal() -> None:
    turns = [*user(TEXT), {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]}]
    asked = {"continue_final_message": True, "add_generation_prompt": False}
    assert chat_job(turns, reader(), **asked).continues


@pytest.mark.parametrize("kind", ["video_url", "input_audio", "file"])
def test_another_kind_of_part_is_refused_by_its_place(kind: str) -> None:
    with pytest.raises(BadRequest, match=r"messages\[0\]\.content\[1\].*text and images are\."):
        chat_job(user(TEXT, {"type": kind}), reader())
