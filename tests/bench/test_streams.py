"""Events add up to an answer; every fault of either has a name."""

import re
from typing import Any

import pytest

from gateway.bench.requests import (
    EventReader,
    Transcript,
    WrongAnswer,
    count_tokens,
    embeddings,
    rerank,
)


def vectors(*rows: Any) -> dict[str, Any]:
    return {"data": [{"embedding": row} for row in rows]}


def test_vectors_are_as_many_as_texts_and_of_one_length() -> None:
    count = embeddings("m", ["a", "b"]).count
    assert count(vectors([1.0, 2.0], [3, 4])) == count(vectors("AACAPw==", "AAAAQA==")) == 2
    for wrong in (vectors([1.0]), vectors([1.0], [1.0, 2.0]), vectors([], [])):
        with pytest.raises(WrongAnswer, match="wrong number of vectors"):
            count(wrong)


def test_every_document_is_scored_once() -> None:
    def ranked(*results: tuple[int, float]) -> dict[str, Any]:
        return {"results": [{"index": i, "relevance_score": score} for i, score in results]}

    count = rerank("m", "q", ["a", "b"]).count
    assert count(ranked((1, 0.9), (0, 0.1))) == 2
    with pytest.raises(WrongAnswer, match="not one score for each document"):
        count(ranked((1, 0.9), (1, 0.1)))
    with pytest.raises(WrongAnswer, match="score is not finite"):
        count(ranked((1, 0.9), (0, float("nan"))))


def test_an_answer_without_text_or_end_is_none() -> None:
    usage = {"completion_tokens": 64}

    def answer(reason: str | None, **message: Any) -> dict[str, Any]:
        return {"choices": [{"message": message, "finish_reason": reason}], "usage": usage}

    assert count_tokens(answer("stop", content="a")) == 64
    assert count_tokens(answer("length", content=None, reasoning="hm")) == 64
    with pytest.raises(WrongAnswer, match="answer is empty"):
        count_tokens(answer("stop", content=""))
    with pytest.raises(WrongAnswer, match="no finish_reason"):
        count_tokens(answer(None, content="a"))


def test_events_are_whole_wherever_the_network_cut_them() -> None:
    stream = b': keep-alive\n\ndata: {"a": 1}\r\n\r\ndata:two\n\n'
    reader = EventReader()
    found = [event for byte in stream for event in reader.feed(bytes([byte]))]
    assert found == [b'{"a": 1}', b"two"]


def test_a_stream_adds_up_to_the_answer_that_was_not_streamed() -> None:
    transcript = Transcript()
    told = [
        transcript.add(event)
        for event in (
            b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
            b'{"choices": [{"delta": {"content": "a"}}]}',
            b'{"choices": [{"delta": {"reasoning_content": "hm"}}]}',
            b'{"choices": [{"delta": {"content": "b"}, "finish_reason": "length"}]}',
            b'{"choices": [], "usage": {"completion_tokens": 9}}',
            b"[DONE]",
        )
    ]
    assert told == [False, True, True, True, False, False]
    answer = transcript.answer()
    assert answer["choices"][0]["message"]["content"] == "ab"
    assert count_tokens(answer) == 9


@pytest.mark.parametrize(
    ("event", "name"),
    [
        (b"{", "event is not JSON"),
        (b"[]", "event is not a chat completion chunk"),
        (b'{"choices": [7]}', "event is not a chat completion chunk"),
        (b'{"choices": [{"delta": {"content": 7}}]}', "event is not a chat completion chunk"),
        (b'{"error": {"code": "engine_failed"}}', "error event engine_failed"),
        (b'{"error": {"type": "server_error", "code": null}}', "error event server_error"),
        (b'{"error": "oh"}', "error event without an error object"),
    ],
)
def test_wrong_events_are_named(event: bytes, name: str) -> None:
    with pytest.raises(WrongAnswer, match=re.escape(name)):
        Transcript().add(event)
