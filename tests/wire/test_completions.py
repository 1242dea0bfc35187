"""Bare prompts → jobs, and deltas → choices."""

from typing import Any

import orjson
import pytest

from gateway.clock import Timings
from gateway.errors import BadRequest, UnsupportedParameter
from gateway.jobs.chat import (
    Delta,
    EchoedPrompt,
    GenerateJob,
    Grammar,
    Likelihood,
    Sampling,
    TokenLogprob,
    Usage,
)
from gateway.wire.answers import Answer
from gateway.wire.completions import CompletionRequest, CompletionWriter, TextChoiceWriter, to_jobs
from gateway.wire.generation import Heading
from gateway.wire.validation import CharBounds, read_request
from tests.fakes import caller


def read(**fields: Any) -> CompletionRequest:
    body = orjson.dumps({"model": "m", "prompt": "p", **fields})
    return read_request(body, CompletionRequest, strict=True).request


def jobs(**fields: Any) -> list[GenerateJob]:
    sampling, bounds = Sampling(temperature=0.3, top_k=7), CharBounds(100, 150)
    return to_jobs(read(**fields), caller(), sampling, bounds=bounds)


def writer(**fields: Any) -> CompletionWriter:
    heading: Heading = {"id": "cmpl-1", "created": 5, "model": "m", "system_fingerprint": "f"}
    return CompletionWriter(read(**fields), heading, Timings())


def test_every_prompt_is_a_job_and_takes_no_template() -> None:
    made = jobs(prompt=["a", "b"], n=2, stop="\n", logprobs=0, max_tokens=3)
    assert [job.prompt for job in made] == ["a", "b"]
    assert all(job.messages == () for job in made)
    assert all((job.n, job.stop, job.logprobs) == (2, ("\n",), 0) for job in made)
    assert all(job.max_tokens == 3 for job in made)


def test_what_is_left_out_comes_from_the_models_defaults() -> None:
    assert jobs()[0].sampling == Sampling(temperature=0.3, top_k=7)
    asked = jobs(temperature=0, top_p=0.5, top_k=-1, seed=-3, logit_bias={"5": -100})[0]
    assert asked.sampling == Sampling(temperature=0, top_p=0.5, seed=-3, logit_bias={5: -100})


SCORED = EchoedPrompt(
    ["a", "", "bc"],
    [
        TokenLogprob(Likelihood("", b"\xe2", -1.5), [Likelihood("x", b"x", -0.5)]),
        TokenLogprob(Likelihood("bc", b"bc", -2.0), [Likelihood("bc", b"bc", -2.0)]),
    ],
)


def test_a_scored_prompt_is_the_beginning_of_text_and_logprobs() -> None:
    choice = TextChoiceWriter(0, echo="abc", with_logprobs=True)
    said = TokenLogprob(Likelihood("d", b"d", -0.25))
    choice.add(Delta(0, "d", 1, None, logprobs=[said], prompt=SCORED))
    choice.add(Delta(0, "e", 1, "stop", logprobs=[said]))
    whole = choice.to_dict()
    assert whole["text"] == "abcde"
    assert whole["logprobs"] == {
        "tokens": ["a", "", "bc", "d", "d"],
        "token_logprobs": [None, -1.5, -2.0, -0.25, -0.25],
        "top_logprobs": [None, {"x": -0.5, "": -1.5}, {"bc": -2.0}, {"d": -0.25}, {"d": -0.25}],
        "text_offset": [0, 1, 1, 3, 4],
    }


def test_a_prompt_of_token_ids_comes_back_as_its_tokens_texts() -> None:
    choice = TextChoiceWriter(0, echo="", with_logprobs=False)
    first = choice.add(Delta(0, "d", 1, "length", prompt=EchoedPrompt(["a", "", "bc"])))
    assert first["text"] == choice.to_dict()["text"] == "abcd"
    assert first["logprobs"] is None


def test_the_engine_echoes_only_facts_that_the_request_lacks() -> None:
    """The request has its text; it lacks logprobs and the texts of token ids."""
    assert not jobs(echo=True)[0].echo
    assert jobs(echo=True, logprobs=0)[0].echo
    assert jobs(echo=True, prompt=[5, 6])[0].echo
    assert not jobs(prompt=[5, 6], logprobs=3)[0].echo
    assert jobs(echo=True, max_tokens=0)[0].max_tokens == 0


def test_a_bias_of_more_tokens_than_a_step_can_bear_is_refused() -> None:
    most = {str(token): 1.0 for token in range(1024)}
    assert len(jobs(logit_bias=most)[0].sampling.logit_bias) == 1024
    with pytest.raises(BadRequest, match="at most 1024 entries, and has 1025") as refused:
        jobs(logit_bias={**most, "1024": 1.0})
    assert refused.value.param == "logit_bias"


def test_vllms_sampling_fields_are_taken_and_tell_what_nobody_has_set() -> None:
    """A model's own files may then set them; the request's values are set, zeros too."""
    unset = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})
    asked = read(
        repetition_penalty=1.1, min_tokens=2, ignore_eos=True, stop_token_ids=[5, 5, 9], top_k=-1
    ).sampling(Sampling(unset=unset))
    assert asked == Sampling(
        repetition_penalty=1.1,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=frozenset({5, 9}),
        unset=frozenset({"temperature", "top_p", "min_p"}),
    )
    assert read(temperature=0, min_p=0).sampling(Sampling(unset=unset)).unset == {
        "top_p", "top_k", "repetition_penalty",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("repetition_penalty", 0), ("repetition_penalty", 11), ("min_tokens", -1),
        ("ignore_eos", 1), ("stop_token_ids", [-1]), ("stop_token_ids", [2**31]),
        ("stop_token_ids", [1] * 257), ("stop_token_ids", ["5"]),
    ],
)  # fmt: skip
def test_vllms_sampling_fields_have_bounds(name: str, given: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        read(**{name: given})
    assert (refused.value.param or "").startswith(name)


@pytest.mark.parametrize("given", [0, 0.0, "", [], True])
def test_only_false_is_let_through_for_beam_search(given: Any) -> None:
    """Python takes 0 for False; JSON does not."""
    assert read(use_beam_search=False).max_tokens == 16
    with pytest.raises(UnsupportedParameter):
        read(use_beam_search=given)


def whole(schema: str) -> Grammar:
    """Expect a schema of which nothing is left to be checked: nobody would tell the verdict."""
    return Grammar("json_schema", schema, strict=True)


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"guided_regex": "[ab]+"}, Grammar("regex", "[ab]+")),
        ({"guided_choice": ["a", "b"]}, Grammar("choice", '["a","b"]')),
        ({"guided_json": {"type": "null"}}, whole('{"type":"null"}')),
        ({"structured_outputs": {"grammar": "start: A"}}, Grammar("grammar", "start: A")),
        ({"response_format": {"type": "json_object"}}, whole('{"type":"object"}')),
        ({"response_format": {"type": "text"}}, None),
        ({}, None),
    ],
)
def test_an_answer_may_be_held_to_a_form(fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert jobs(**fields)[0].grammar == grammar


def test_a_prompt_beyond_the_limit_of_characters_is_refused() -> None:
    with pytest.raises(BadRequest) as caught:
        jobs(prompt=["a", "b" * 101])
    assert caught.value.param == "prompt"


def test_choices_are_counted_prompt_by_prompt() -> None:
    choices = [[Delta(index, "!", 1, "stop")] for index in range(4)]
    answer = writer(prompt=["a", "b"], n=2, echo=True).whole(Answer(choices, Usage(2, 4)))
    written = orjson.loads(orjson.dumps(answer))["choices"]
    assert [choice["index"] for choice in written] == [0, 1, 2, 3]
    assert [choice["text"] for choice in written] == ["a!", "a!", "b!", "b!"]


def test_a_choice_adds_up_to_its_chunks() -> None:
    choice = TextChoiceWriter(0, echo="", with_logprobs=True)
    deltas = [Delta(0, text, 1, logprobs=[scored(text)]) for text in ("Grü", "ße")]
    chunks: list[Any] = [choice.add(delta) for delta in (*deltas, Delta(0, "", 1, "stop"))]
    whole: Any = choice.to_dict()
    assert whole["text"] == "Grüße"
    assert whole["finish_reason"] == "stop"
    assert whole["logprobs"]["text_offset"] == [0, 3]
    for name in whole["logprobs"]:
        added_up = [value for chunk in chunks for value in chunk["logprobs"][name]]
        assert added_up == whole["logprobs"][name]


def test_of_tokens_with_one_text_the_likelier_is_told_and_the_chosen_always() -> None:
    """This endpoint's top_logprobs are keyed by text."""
    token = TokenLogprob(
        likelihood("z", -9.0), (likelihood("a", -0.1), likelihood("b", -1.0), likelihood("b", -2.0))
    )
    choice = TextChoiceWriter(0, echo="", with_logprobs=True)
    chunk: Any = choice.add(Delta(0, "z", 1, logprobs=[token]))
    (top,) = chunk["logprobs"]["top_logprobs"]
    assert list(top.items()) == [("a", -0.1), ("b", -1.0), ("z", -9.0)]


def test_a_whole_answer_has_usage_and_a_chunk_has_not() -> None:
    delta = Delta(0, "a", 1, "length")
    (chunk,) = writer().add(delta)
    whole = orjson.loads(orjson.dumps(writer().whole(Answer([[delta]], Usage(2, 1)))))
    assert "usage" not in chunk
    assert whole.pop("usage")["total_tokens"] == 3
    assert whole == chunk


def scored(text: str) -> TokenLogprob:
    return TokenLogprob(likelihood(text, -0.5), (likelihood(text, -0.5),))


def likelihood(text: str, logprob: float) -> Likelihood:
    return Likelihood(text, text.encode(), logprob)
