"""What counts as a right answer, and what a wrong one is called."""

import base64
import re
from typing import Any

import numpy as np
import pytest

from gateway.bench import judging
from gateway.bench.events import EventReader, Transcript
from gateway.bench.judging import WrongAnswer, judge_answer


def vectors(*rows: Any) -> dict[str, Any]:
    return {"data": [{"embedding": row} for row in rows]}


def coded(*numbers: float) -> str:
    return base64.b64encode(np.array(numbers, dtype="<f4").tobytes()).decode()


def said(content: Any, **choice: Any) -> dict[str, Any]:
    whole = {"message": {"content": content}, "finish_reason": "stop", **choice}
    return {"choices": [whole], "usage": {"completion_tokens": 3}}


def test_vectors_may_be_numbers_or_base64() -> None:
    """Peers answer in either, whatever was asked."""
    assert judge_answer(judging.expect_vectors(2), vectors([1.0, 2.0], [3, 4])) == 2
    assert judge_answer(judging.expect_vectors(1), vectors(coded(1, 2))) == 1


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        ({}, "answer has another shape"),
        ({"data": [{}]}, "answer has another shape"),
        (vectors([1.0]), "wrong number of vectors"),
        (vectors([1.0], [1.0, 2.0]), "vectors of different lengths"),
        (vectors([], []), "vectors of different lengths"),
        (vectors([1.0], coded(float("nan"))), "vector is not finite"),
        (vectors([1.0], [None]), "vector is not finite"),
        (vectors([1.0], ["x"]), "vector is no numbers"),
        (vectors([1.0], "not base64!"), "vector is no numbers"),
    ],
)
def test_wrong_vectors_are_named(answer: Any, name: str) -> None:
    """Each for what is wrong with it."""
    with pytest.raises(WrongAnswer, match=name):
        judge_answer(judging.expect_vectors(2), answer)


def ranked(*results: tuple[int, Any]) -> dict[str, Any]:
    return {"results": [{"index": index, "relevance_score": score} for index, score in results]}


def test_documents_are_all_scored_and_the_best_come_first() -> None:
    assert judge_answer(judging.expect_scores(2), ranked((1, 0.9), (0, 0.9))) == 2


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        ({}, "answer has another shape"),
        ({"results": [{"index": 0}]}, "wrong documents"),
        ({"results": [{"index": 0}, {"index": 1}]}, "answer has another shape"),
        (ranked((0, 0.9)), "wrong documents"),
        (ranked((0, 0.9), (0, 0.8)), "wrong documents"),
        (ranked((0, 0.9), (2, 0.8)), "wrong documents"),
        (ranked((0, 0.8), (1, 0.9)), "documents are not sorted"),
        (ranked((0, None), (1, 0.9)), "score is not finite"),
        (ranked((0, float("nan")), (1, 0.9)), "score is not finite"),
    ],
)
def test_a_wrong_ranking_is_named(answer: Any, name: str) -> None:
    with pytest.raises(WrongAnswer, match=name):
        judge_answer(judging.expect_scores(2), answer)


def test_an_answer_ends_for_a_reason() -> None:
    """And says how many tokens it has."""
    assert judge_answer(judging.judge_text, said("hi")) == 3
    with pytest.raises(WrongAnswer, match="no finish_reason"):
        judge_answer(judging.judge_text, said("hi", finish_reason=None))
    with pytest.raises(WrongAnswer, match="answer has another shape"):
        judge_answer(judging.judge_text, {"choices": [{"finish_reason": "stop"}]})


@pytest.mark.parametrize("content", ["", None])
def test_tokens_say_something(content: Any) -> None:
    """None of them may say nothing."""
    with pytest.raises(WrongAnswer, match="answer is empty"):
        judge_answer(judging.judge_text, said(content))
    empty = {**said(content), "usage": {"completion_tokens": 0}}
    assert judge_answer(judging.judge_text, empty) == 0


@pytest.mark.parametrize(
    "message",
    [
        {"content": "a"},
        {"content": None, "reasoning_content": "a"},
        {"content": "", "reasoning": "a"},
        {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    ],
)
def test_reasoning_and_tool_calls_say_something_too(message: dict[str, Any]) -> None:
    """A message may be nothing else."""
    assert judge_answer(judging.judge_text, said("", message=message)) == 3


def test_there_are_no_more_tokens_than_bytes() -> None:
    """A token may be a byte of a letter; some marks, and reasoning that is not shown, are none."""

    def answer(content: str, tokens: int, **details: int) -> dict[str, Any]:
        usage = {"completion_tokens": tokens, "completion_tokens_details": details or None}
        return {**said(content), "usage": usage}

    assert judge_answer(judging.judge_text, answer("🌍" * 50, 200)) == 200
    assert judge_answer(judging.judge_text, answer("several words a token " * 10, 1)) == 1
    assert judge_answer(judging.judge_text, answer("yes", 900, reasoning_tokens=896)) == 900
    with pytest.raises(WrongAnswer, match="more tokens than text"):
        judge_answer(judging.judge_text, answer("yes", 900))


def test_a_stream_that_says_nothing_has_no_tokens() -> None:
    """Whatever its usage claims."""
    transcript = Transcript()
    for event in (
        b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
        b'{"choices": [{"delta": {}, "finish_reason": "stop"}]}',
        b'{"choices": [], "usage": {"completion_tokens": 64}}',
        b"[DONE]",
    ):
        assert not transcript.add(event)
    with pytest.raises(WrongAnswer, match="answer is empty"):
        judge_answer(judging.judge_text, transcript.answer())


def test_a_stream_of_tool_calls_says_something() -> None:
    """In fragments."""
    transcript = Transcript()
    for event in (
        b'{"choices": [{"delta": {"tool_calls": [{"function": {"name": "f"}}]}}]}',
        b'{"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "{}"}}]}}]}',
        b'{"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}',
        b'{"choices": [], "usage": {"completion_tokens": 20}}',
        b"[DONE]",
    ):
        transcript.add(event)
    assert judge_answer(judging.judge_text, transcript.answer()) == 20


def test_structured_answers_keep_to_their_schema() -> None:
    """Parsed, and checked."""
    judge = judging.expect_schema({"type": "object", "required": ["a"]})
    assert judge_answer(judge, said('{"a": 1}')) == 3
    for content, name in (("{", "not JSON"), ("[]", "not match"), ("{}", "not match")):
        with pytest.raises(WrongAnswer, match=name):
            judge_answer(judge, said(content))
    with pytest.raises(WrongAnswer, match="empty"):
        judge_answer(judge, said(None))


def test_every_token_has_its_logprobs() -> None:
    """As many as were asked for, none above zero."""

    def answer(*tokens: Any) -> dict[str, Any]:
        return said("x", logprobs={"content": list(tokens)})

    token = {"logprob": -0.5, "top_logprobs": [{"logprob": -0.5}, {"logprob": -2}]}
    judge = judging.expect_logprobs(2)
    assert judge_answer(judge, answer(token)) == 3
    for wrong, name in (
        (answer(), "no logprobs"),
        (answer({**token, "top_logprobs": []}), "wrong number"),
        (answer({**token, "logprob": 0.7}), "no logprob"),
        (answer({"top_logprobs": [{}, {}]}), "another shape"),
    ):
        with pytest.raises(WrongAnswer, match=name):
            judge_answer(judge, wrong)


def test_events_are_whole_wherever_the_network_cut_them() -> None:
    """A byte at a time, comments and \\r\\n between."""
    stream = b': keep-alive\n\ndata: {"a": 1}\r\n\r\ndata:two\n\n'
    reader = EventReader()
    found = [event for byte in stream for event in reader.feed(bytes([byte]))]
    assert found == [b'{"a": 1}', b"two"]


def test_a_stream_adds_up_to_the_answer_that_was_not_streamed() -> None:
    """Text, finish_reason and usage; a chunk that only says the role says nothing."""
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
    assert judge_answer(judging.judge_text, answer) == 9


def test_without_usage_each_piece_is_a_token() -> None:
    """Some servers don't stream usage."""
    transcript = Transcript()
    for event in (
        b'{"choices": [{"delta": {"content": "a"}}]}',
        b'{"choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}]}',
        b"[DONE]",
    ):
        transcript.add(event)
    assert judge_answer(judging.judge_text, transcript.answer()) == 2


@pytest.mark.parametrize(
    ("event", "name"),
    [
        (b"{", "event is not JSON"),
        (b"[]", "event is no object"),
        (b'{"choices": [7]}', "event has another shape"),
        (b'{"choices": [{"delta": {"content": 7}}]}', "event has another shape"),
        (b'{"error": {"code": "engine_failed"}}', "error event engine_failed"),
        (b'{"error": {"type": "server_error", "code": null}}', "error event server_error"),
        (b'{"error": "oh"}', "error event of no shape"),
    ],
)
def test_wrong_events_are_named(event: bytes, name: str) -> None:
    """Each for what is wrong with it."""
    with pytest.raises(WrongAnswer, match=re.escape(name)):
        Transcript().add(event)


def test_a_stream_must_say_that_it_is_over() -> None:
    """Else what came may be a part."""
    with pytest.raises(WrongAnswer, match=re.escape("stream without [DONE]")):
        Transcript().answer()
