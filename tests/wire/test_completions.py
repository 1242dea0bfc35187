"""Bare prompts → jobs, and deltas → choices."""

from typing import Any

import orjson
import pytest

from gateway.errors import BadRequest, UnsupportedParameter
from gateway.jobs import Delta, GenerateJob, Grammar, Likelihood, Sampling, TokenLogprob, Usage
from gateway.wire.completions import (
    FIELDS,
    Choice,
    CompletionRequest,
    Heading,
    choices,
    to_jobs,
)
from gateway.wire.reading import read_request
from tests.fakes import caller


def read(**fields: Any) -> CompletionRequest:
    body = orjson.dumps({"model": "m", "prompt": "p", **fields})
    return read_request(body, CompletionRequest, FIELDS, strict=True).request


def jobs(**fields: Any) -> list[GenerateJob]:
    return to_jobs(read(**fields), caller(), Sampling(temperature=0.3, top_k=7), max_chars=100)


def test_every_prompt_is_a_job_and_takes_no_template() -> None:
    """With the same wishes each."""
    made = jobs(prompt=["a", "b"], n=2, stop="\n", logprobs=0, max_tokens=3)
    assert [job.prompt for job in made] == ["a", "b"]
    assert all(job.messages == () for job in made)
    assert all((job.n, job.stop, job.logprobs) == (2, ("\n",), 0) for job in made)
    assert all(job.max_tokens == 3 for job in made)


def test_what_is_left_out_comes_from_the_models_defaults() -> None:
    """And what is given does not."""
    assert jobs()[0].sampling == Sampling(temperature=0.3, top_k=7)
    asked = jobs(temperature=0, top_p=0.5, top_k=-1, seed=-3, logit_bias={"5": -100})[0]
    assert asked.sampling == Sampling(temperature=0, top_p=0.5, seed=-3, logit_bias={5: -100})


@pytest.mark.parametrize("given", [0, 0.0, "", [], True])
def test_only_what_asks_for_nothing_is_let_through(given: Any) -> None:
    """Python takes 0 for False; JSON does not."""
    assert read(use_beam_search=False).max_tokens == 16
    with pytest.raises(UnsupportedParameter):
        read(use_beam_search=given)


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"guided_regex": "[ab]+"}, Grammar("regex", "[ab]+")),
        ({"guided_choice": ["a", "b"]}, Grammar("choice", '["a","b"]')),
        ({"guided_json": {"type": "null"}}, Grammar("json_schema", '{"type":"null"}')),
        ({"structured_outputs": {"grammar": "start: A"}}, Grammar("grammar", "start: A")),
        ({"response_format": {"type": "json_object"}}, Grammar("json_schema", '{"type":"object"}')),
        ({"response_format": {"type": "text"}}, None),
        ({}, None),
    ],
)
def test_an_answer_may_be_held_to_a_form(fields: dict[str, Any], grammar: Grammar | None) -> None:
    """In vLLM's words, new and old, and in OpenAI's."""
    assert jobs(**fields)[0].grammar == grammar


def test_a_prompt_beyond_the_limit_of_characters_is_refused() -> None:
    """Before anybody tokenises it."""
    with pytest.raises(BadRequest) as caught:
        jobs(prompt=["a", "b" * 101])
    assert caught.value.param == "prompt"


def test_choices_are_counted_prompt_by_prompt() -> None:
    """And begin with their own prompt when it is echoed."""
    made = choices(read(prompt=["a", "b"], n=2, echo=True))
    for index, choice in enumerate(made):
        choice.add(Delta(index, "!", 1, "stop"))
    whole = [choice.whole() for choice in made]
    assert [each["index"] for each in whole] == [0, 1, 2, 3]
    assert [each["text"] for each in whole] == ["a!", "a!", "b!", "b!"]


def test_a_choice_adds_up_to_its_chunks() -> None:
    """Text and all four lists of logprobs."""
    choice = Choice(0, echoed="", with_logprobs=True)
    chunks = [choice.add(Delta(0, text, 1, logprobs=[scored(text)])) for text in ("Grü", "ße")]
    chunks.append(choice.add(Delta(0, "", 1, "stop")))
    whole = choice.whole()
    assert whole["text"] == "Grüße"
    assert whole["finish_reason"] == "stop"
    assert whole["logprobs"]["text_offset"] == [0, 3]
    for name in whole["logprobs"]:
        added_up = [value for chunk in chunks for value in chunk["logprobs"][name]]
        assert added_up == whole["logprobs"][name]


def test_of_tokens_with_one_text_the_likelier_is_told_and_the_chosen_always() -> None:
    """This endpoint's top_logprobs are keyed by text."""
    token = TokenLogprob(
        likelihood("z", -9.0),
        (likelihood("a", -0.1), likelihood("b", -1.0), likelihood("b", -2.0)),
    )
    choice = Choice(0, echoed="", with_logprobs=True)
    (top,) = choice.add(Delta(0, "z", 1, logprobs=[token]))["logprobs"]["top_logprobs"]
    assert list(top.items()) == [("a", -0.1), ("b", -1.0), ("z", -9.0)]


def test_a_whole_answer_has_usage_and_a_chunk_has_not() -> None:
    """Under one heading."""
    heading = Heading("cmpl-1", 5, "m", "f")
    choice = Choice(0, echoed="", with_logprobs=False)
    chunk = orjson.loads(heading.chunk(choice.add(Delta(0, "a", 1, "length"))))
    whole = orjson.loads(heading.whole([choice], Usage(2, 1)))
    assert "usage" not in chunk
    assert whole.pop("usage")["total_tokens"] == 3
    assert whole == chunk


def scored(text: str) -> TokenLogprob:
    return TokenLogprob(likelihood(text, -0.5), (likelihood(text, -0.5),))


def likelihood(text: str, logprob: float) -> Likelihood:
    return Likelihood(text, text.encode(), logprob)
