"""Images in conversations with a model that reads text: left out, or refused."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadRequest
from gateway.jobs.chat import Sampling
from gateway.wire import anthropic, chat, responses
from gateway.wire.images import leave_images_out
from gateway.wire.validation import Request, read_request
from tests.fakes import caller

TEXT = "[image left out: this model reads text]"
Turn = dict[str, Any]


def _chat_prompt(request: Any, turns: Any) -> Any:
    whole = request.model_copy(update={"messages": turns})
    return chat.to_job(
        whole, caller(), Sampling(), max_tokens=9, template_args={}, max_chars=10**7
    ).messages


def _message_prompt(request: Any, turns: Any) -> Any:
    whole = request.model_copy(update={"messages": turns})
    return anthropic.to_job(whole, caller(), Sampling(), template_args={}, max_chars=10**7).messages


def _response_prompt(request: Any, turns: Any) -> Any:
    return responses.to_job(
        request,
        caller(),
        Sampling(),
        items=turns,
        max_tokens=9,
        template_args={},
        max_chars=10**7,
    ).messages


@dataclass(frozen=True)
class Api:
    """The forms that an API has for images, texts, tools' results and prompts."""

    shape: type[Request]
    field: str
    image: Mapping[str, Any]
    text: str  # the type of a piece of text
    result: Callable[[list[Any]], list[Turn]]  # a call, and its result
    prompt: Callable[[Any, Any], Any]
    more: Mapping[str, Any]

    def request(self, turns: list[Turn]) -> Any:
        body = orjson.dumps({"model": "m", self.field: turns, **self.more})
        return read_request(body, self.shape, strict=True).request

    def asked(self, turns: list[Turn]) -> Any:
        """Give the prompt of a conversation as it is."""
        request = self.request(turns)
        return self.prompt(request, getattr(request, self.field))

    def left_out(self, turns: list[Turn]) -> tuple[Any, int]:
        """Give the prompt without images, and how many were left out."""
        request = self.request(turns)
        kept, count = leave_images_out(getattr(request, self.field))
        return self.prompt(request, kept), count

    def say(self, text: str) -> dict[str, Any]:
        return {"type": self.text, "text": text}


APIS = {
    "chat": Api(
        chat.ChatRequest,
        "messages",
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,%%", "detail": "low"}},
        "text",
        lambda parts: [
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "function": {"name": "see", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": parts},
        ],
        _chat_prompt,
        {},
    ),
    "responses": Api(
        responses.ResponsesRequest,
        "input",
        {"type": "input_image", "image_url": "data:image/png;base64,%%", "detail": "high"},
        "input_text",
        lambda parts: [
            {"type": "function_call", "call_id": "c", "name": "see", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": parts},
        ],
        _response_prompt,
        {},
    ),
    "messages": Api(
        anthropic.MessagesRequest,
        "messages",
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": "%%"},
            "cache_control": {"type": "ephemeral"},
        },
        "text",
        lambda parts: [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "see"}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": parts}],
            },
        ],
        _message_prompt,
        {"max_tokens": 9},
    ),
}
EACH = pytest.mark.parametrize("api", APIS.values(), ids=APIS)


def user(*parts: Any) -> Turn:
    return {"role": "user", "content": list(parts)}


def said(text: str = "so") -> Turn:
    return {"role": "assistant", "content": text}


@EACH
def test_an_image_of_an_earlier_turn_is_a_text_in_its_place(api: Api) -> None:
    """Its base64 may be broken: nobody reads it."""
    turns = [user(api.image, api.say("what?")), said(), user(api.say("and now?"))]
    prompt, count = api.left_out(turns)
    assert count == 1
    assert prompt[0]["content"].startswith(TEXT)
    assert prompt[0]["content"].endswith("what?")


@EACH
def test_an_image_that_is_all_of_a_message_is_a_text_too(api: Api) -> None:
    prompt, count = api.left_out([user(api.image), said(), user(api.say("hi"))])
    assert (prompt[0]["content"], count) == (TEXT, 1)


@EACH
@pytest.mark.parametrize("ends", [False, True], ids=["then the user", "at the end"])
def test_an_image_of_a_tools_result_becomes_a_text(api: Api, ends: bool) -> None:
    """An image of the newest turn is a text too: a tool brought it."""
    turns = [user(api.say("look")), *api.result([api.say("here: "), api.image])]
    prompt, count = api.left_out(turns if ends else [*turns, said(), user(api.say("go on"))])
    assert count == 1
    assert (prompt[2]["role"], prompt[2]["content"].endswith(TEXT)) == ("tool", True)


@EACH
def test_an_image_that_the_model_has_answered_by_a_call_is_left_out(api: Api) -> None:
    """Another model may have begun the session, which goes on with the result."""
    _, count = api.left_out([user(api.image), *api.result([api.image])])
    assert count == 2


@EACH
def test_a_message_right_behind_a_tools_result_has_that_tools_image(api: Api) -> None:
    """A note of the system between the two changes nothing, unlike a turn of anybody else."""
    note = {"role": "system", "content": "x"}
    turns = [user(api.say("look")), *api.result([api.say("read")])]
    for between in ([], [note]):
        prompt, count = api.left_out([*turns, *between, user(api.image)])
        assert (count, prompt[-1]["content"]) == (1, TEXT)
    with pytest.raises(BadRequest, match="Could not process image"):
        api.left_out([*turns, said(), user(api.image)])
    with pytest.raises(BadRequest, match="Could not process image"):
        api.left_out([*turns, user(api.say("and now")), user(api.image)])


def test_a_thought_behind_the_newest_message_is_the_beginning_of_its_answer() -> None:
    api = APIS["responses"]
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    with pytest.raises(BadRequest, match="Could not process image"):
        api.left_out([user(api.image), thought])


def test_a_skipped_item_between_a_tools_result_and_its_image_changes_nothing() -> None:
    api = APIS["responses"]
    items = [*api.result([api.say("read")]), {"type": "ghost_snapshot"}, user(api.image)]
    body = orjson.dumps({"model": "m", "input": items})
    request = read_request(body, responses.ResponsesRequest, strict=False).request
    assert leave_images_out(request.input)[1] == 1


@pytest.mark.parametrize("name", ["chat", "messages"])
def test_no_text_takes_an_images_place_where_the_answer_goes_on(name: str) -> None:
    """The model would go on with the text; an image in a finished answer stays a text."""
    api = APIS[name]
    begun = {"role": "assistant", "content": [api.image, api.say("It is"), api.image]}
    turns = [user(api.say("draw")), begun, user(api.say("more")), begun]
    request = api.request(turns)
    kept, count = leave_images_out(request.messages, continues=True)
    prompt = api.prompt(request, kept)
    assert count == 4
    assert (prompt[1]["content"], prompt[3]["content"]) == (f"{TEXT}It is{TEXT}", "It is")


@EACH
@pytest.mark.parametrize("end", [[], [said("It is")], [{"role": "system", "content": "x"}]])
def test_an_image_of_the_newest_message_is_refused(api: Api, end: list[Turn]) -> None:
    """An image before the beginning of its answer is refused too; the 400 gives advice."""
    turns = [user(api.image), user(api.say("what?"), api.image), *end]
    with pytest.raises(BadRequest, match="Could not process image") as refused:
        api.left_out(turns)
    text = str(refused.value)
    assert f"Invalid '{api.field}[1].content[1]'" in text
    for advice in ("Send text", "GATEWAY_LEAVE_OUT_IMAGES=true", "x-gateway-leave-out-images"):
        assert advice in text


def test_an_item_that_is_skipped_ends_no_message() -> None:
    """A client may note where the user's message stood in its history."""
    items = [user(APIS["responses"].image), {"type": "ghost_snapshot", "role": "user"}]
    body = orjson.dumps({"model": "m", "input": items})
    request = read_request(body, responses.ResponsesRequest, strict=False).request
    assert leave_images_out(request.input) == (request.input, 0)


@EACH
def test_of_messages_in_a_row_the_last_is_the_newest(api: Api) -> None:
    """A refused message stays in the history, without an answer."""
    prompt, count = api.left_out([user(api.image, api.say("what?")), user(api.say("never mind"))])
    assert count == 1
    assert TEXT in prompt[0]["content"]


@EACH
def test_a_system_messages_image_is_refused(api: Api) -> None:
    turns = [{"role": "system", "content": [api.image]}, user(api.say("hi"))]
    with pytest.raises(BadRequest, match="Could not process image"):
        api.left_out(turns)


@EACH
def test_an_assistants_image_is_left_out(api: Api) -> None:
    turns = [user(api.say("draw")), {"role": "assistant", "content": [api.image]}]
    prompt, count = api.left_out([*turns, user(api.say("thanks"))])
    assert (prompt[1]["content"], count) == (TEXT, 1)


@EACH
def test_a_thousand_images_are_left_out(api: Api) -> None:
    prompt, count = api.left_out([user(*[api.image] * 1000), said(), user(api.say("hi"))])
    assert (prompt[0]["content"].count(TEXT), count) == (1000, 1000)


def test_an_image_inside_a_document_of_a_result_is_left_out() -> None:
    api = APIS["messages"]
    source = {"type": "content", "content": [{"type": "text", "text": "a"}, api.image]}
    document = {"type": "document", "title": "Plan", "source": source}
    prompt, count = api.left_out([user(api.say("look")), *api.result([document])])
    assert (prompt[2]["content"], count) == (f"Plan\na\n\n{TEXT}", 1)
    with pytest.raises(BadRequest, match=r"messages\[0\]\.content\[0\]\.source"):
        api.left_out([user(document)])


def test_the_users_own_image_beside_a_tools_result_is_refused() -> None:
    api = APIS["messages"]
    call, answer = api.result([api.image])
    with pytest.raises(BadRequest, match=r"messages\[2\]\.content\[1\]"):
        api.left_out([user(api.say("a")), call, user(*answer["content"], api.image)])


def test_a_call_that_says_it_is_an_image_is_no_image() -> None:
    call = {"id": "c", "type": "image", "function": {"name": "see", "arguments": "{}"}}
    turns = [user(APIS["chat"].say("a")), {"role": "assistant", "tool_calls": [call]}]
    answer = {"role": "tool", "tool_call_id": "c", "content": "b"}
    assert APIS["chat"].left_out([*turns, answer])[1] == 0


PARTS = st.lists(st.sampled_from(["image", "a", "b "]), min_size=1, max_size=4)
TURNS = st.lists(
    st.tuples(st.sampled_from(["user", "result", "assistant"]), PARTS), min_size=1, max_size=8
)


def _conversation(api: Api, drawn: Any, image: Mapping[str, Any]) -> list[Turn]:
    turns: list[Turn] = []
    for kind, names in drawn:
        parts = [image if name == "image" else api.say(name) for name in names]
        if kind == "result":
            turns += api.result(parts)
        else:
            turns.append({"role": kind, "content": parts})
    return turns


@pytest.mark.generator(weight=0.3)
@EACH
@given(drawn=TURNS)
def test_a_prompt_is_as_with_texts_and_begins_as_the_one_before(api: Api, drawn: Any) -> None:
    """A prompt without an image is the same to a byte, left out or not."""
    end = user(api.say("go on"))
    turns = [*_conversation(api, drawn, api.image), end]
    texts = [*_conversation(api, drawn, api.say(TEXT)), end]
    prompt, count = api.left_out(turns)
    assert orjson.dumps(prompt) == orjson.dumps(api.asked(texts))
    assert count == sum(names.count("image") for _, names in drawn)
    assert api.left_out(texts) == (api.asked(texts), 0)
    later, _ = api.left_out([*turns, said(), user(api.say("more"))])
    assert later[: len(prompt)] == prompt
