"""POST /v1/decisions over a socket, with a scripted engine: label i has the logprob -1 - i."""

import asyncio
import math
from typing import Any

import httpx2
import pytest
from httpx2 import AsyncClient, Response

from gateway.registry import Catalog
from tests.api.harness import error_of, held
from tests.fakes import ScriptedChat, ScriptedEngines
from tests.serving_app import served

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("engines")]
WEIGHTS = [math.exp(-i) for i in range(3)]
PREDICATE = {"type": "predicate", "instructions": "It rains."}


@pytest.fixture
def engines() -> ScriptedEngines:
    return ScriptedEngines(chat=ScriptedChat(max_context=10_000))


def ask(questions: Any, evidence: Any = "The sky is grey.", **more: Any) -> dict[str, Any]:
    return {"model": "writer", "input": evidence, "questions": questions, **more}


async def post(
    client: AsyncClient, questions: Any, evidence: Any = "The sky is grey.", **more: Any
) -> Response:
    return await client.post("/v1/decisions", json=ask(questions, evidence, **more))


def shares(count: int) -> Any:
    total = sum(WEIGHTS[:count])
    return pytest.approx([weight / total for weight in WEIGHTS[:count]])


async def test_answers_come_in_the_order_of_the_questions(client: AsyncClient) -> None:
    choices = [{"value": "late", "description": "after five"}, {"value": True}]
    levels = [{"label": "bad"}, {"label": "fair"}, {"label": "good"}]
    response = await post(
        client,
        [
            {**PREDICATE, "name": "rain"},
            {"type": "choice", "instructions": "Which?", "choices": choices},
            {"type": "score", "instructions": "How?", "levels": levels, "name": "mood"},
        ],
    )
    assert response.status_code == 200
    decision = response.json()
    predicate, choice, score = decision["answers"]
    two, three = shares(2).expected, shares(3).expected
    assert decision["model"] == "writer"
    assert predicate == {"type": "predicate", "name": "rain", "probability": pytest.approx(two[0])}
    assert (choice["type"], choice["name"], choice["choice"]) == ("choice", None, "late")
    assert [each["value"] for each in choice["probabilities"]] == ["late", True]
    assert [each["probability"] for each in choice["probabilities"]] == shares(2)
    assert choice["confidence"] == pytest.approx(2 * two[0] - 1)
    assert (score["type"], score["name"]) == ("score", "mood")
    told = [(each["label"], each["value"]) for each in score["probabilities"]]
    assert told == [("bad", 0), ("fair", 1), ("good", 2)]
    assert [each["probability"] for each in score["probabilities"]] == shares(3)
    assert score["score"] == pytest.approx(three[1] + 2 * three[2])
    assert score["confidence"] == pytest.approx((3 * three[0] - 1) / 2)
    usage = decision["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] > 0
    assert usage["input_tokens_details"] == {"cached_tokens": 0 + 1 + 2, "cache_write_tokens": 0}
    assert (usage["output_tokens"], usage["output_tokens_details"]["reasoning_tokens"]) == (0, 0)


def choice(*values: Any) -> dict[str, Any]:
    choices = [{"value": value} for value in values]
    return {"type": "choice", "instructions": "x", "choices": choices}


def score(*labels: str) -> dict[str, Any]:
    levels = [{"label": label} for label in labels]
    return {"type": "score", "instructions": "x", "levels": levels}


IMAGE = [{"type": "input_image", "image_url": "data:,"}]
BAD: list[tuple[Any, str]] = [
    ([], "questions"),
    ([PREDICATE] * 401, "questions"),
    ([{"type": "essay", "instructions": "x"}], "questions[0].type"),
    ([{"type": "predicate"}], "questions[0].instructions"),
    ([{**PREDICATE, "instructions": " "}], "questions[0].instructions"),
    ([{**PREDICATE, "instructions": IMAGE}], "questions[0].instructions"),
    ([{"type": "choice", "instructions": "x"}], "questions[0].choices"),
    ([choice("a")], "questions[0].choices"),
    ([choice("a", 1)], "questions[0].choices[1].value"),
    ([choice(True, True)], "questions[0].choices"),
    ([PREDICATE, choice("a", "a")], "questions[1].choices"),
    ([choice(*map(str, range(256)))], "questions[0].choices"),
    ([{"type": "score", "instructions": "x"}], "questions[0].levels"),
    ([score("a", "a")], "questions[0].levels"),
]


@pytest.mark.parametrize(("questions", "param"), BAD)
async def test_a_bad_question_is_named(client: AsyncClient, questions: Any, param: str) -> None:
    assert error_of(await post(client, questions))["param"] == param


BAD_INPUTS: list[tuple[Any, str]] = [
    ([], "input"),
    ([{"role": "user", "content": IMAGE}], "input[0].content"),
    ([{"type": "message", "content": "x"}, {"content": "y"}], "input[0].role"),
    ([{"type": "reasoning"}], "input[0].type"),
    ([{"type": "function_call_output", "call_id": "c", "output": "x"}], "input[0].call_id"),
    ([{"type": "function_call", "call_id": "c", "arguments": "{}"}], "input[0].name"),
]


@pytest.mark.parametrize(("evidence", "param"), BAD_INPUTS)
async def test_a_bad_item_is_named(client: AsyncClient, evidence: Any, param: str) -> None:
    assert error_of(await post(client, [PREDICATE], evidence))["param"] == param


async def test_an_input_of_items_is_one_text(client: AsyncClient, engines: ScriptedEngines) -> None:
    """Each item has a line above it with its role or the function it belongs to."""
    asked = {"type": "input_text", "text": "Rain? "}
    data = {"type": "input_json", "data": {"town": "Ulm"}}
    answered = [{"type": "input_text", "text": "a b"}]
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [asked, data]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "wet"},
        {"type": "custom_tool_call", "call_id": "c", "name": "run", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": answered},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    assert (await post(client, [PREDICATE], items)).status_code == 200
    (job,) = engines.chat.jobs
    assert job.template_args["enable_thinking"] is False
    (message,) = job.messages
    assert message["content"] == (
        "Judge the following input by the question after it.\n\nInput:\n"
        '[developer]\nBe kind.\n\n[user]\nRain? {"town":"Ulm"}\n\n[call of look]\n{}\n\n'
        "[output of look]\nwet\n\n[call of run]\nls\n\n[output of run]\na b\n\n[assistant]\nNo.\n\n"
    )


async def test_a_boolean_is_no_string(client: AsyncClient, engines: ScriptedEngines) -> None:
    decision = (await post(client, [choice(True, "true", "other")])).json()
    values = [each["value"] for each in decision["answers"][0]["probabilities"]]
    assert [type(value) for value in values] == [bool, str, str]
    assert decision["answers"][0]["choice"] is True
    assert engines.chat.jobs[0].questions[0].labels == ["true", '"true"', '"other"']


async def test_options_of_another_type_of_question_are_named(client: AsyncClient) -> None:
    of_choice, of_score = choice("a", "b"), score("low", "high")
    questions = [
        of_choice | of_score | PREDICATE,
        of_score | of_choice,
        {**of_choice, **of_score, "a": 1},
        {**of_score, "choices": None},
    ]
    response = await post(client, questions)
    assert response.status_code == 200
    named = ["[0].choices", "[0].levels", "[1].levels", "[2].a", "[2].choices"]
    assert response.headers["x-gateway-ignored"] == ",".join(f"questions{name}" for name in named)


async def test_an_embedding_model_cannot_decide(client: AsyncClient) -> None:
    error = error_of(await post(client, [PREDICATE], model="embed"))
    assert error["param"] == "model"
    assert error["message"].endswith("cannot be used for decisions.")


async def test_an_input_too_long_is_refused_by_its_name(client: AsyncClient) -> None:
    error = error_of(await post(client, [PREDICATE], "x" * 20_000))
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


async def test_a_question_that_breaks_is_an_error(client: AsyncClient) -> None:
    broken = await post(client, [PREDICATE, {**PREDICATE, "instructions": "poison"}])
    assert broken.status_code == 500
    assert (await post(client, [PREDICATE])).status_code == 200


async def test_requests_at_once_each_have_their_answers(client: AsyncClient) -> None:
    counts = [1, 70, 3, 400]  # the last is the most that may be asked
    decisions = await asyncio.gather(
        *(post(client, [{**PREDICATE, "name": f"{count}"}] * count) for count in counts)
    )
    for count, response in zip(counts, decisions, strict=True):
        names = [each["name"] for each in response.json()["answers"]]
        assert names == [f"{count}"] * count


async def test_questions_count_as_choices_and_what_is_wrong_is_told_though_the_queue_is_full(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """A 429 would have a wrong question sent again. The places are free again after the answer."""
    async with served(models, engines, queue_limit=4) as client:
        async with held(engines.chat.gate, post(client, [PREDICATE] * 4)) as first:
            refused = await post(client, [PREDICATE])
            assert refused.status_code == 429
            assert "retry-after" in refused.headers
            assert (await post(client, [{**PREDICATE, "type": "essay"}])).status_code == 400
            assert (await client.post("/v1/decisions", content=b'{"model": ')).status_code == 400
            assert (await post(client, [PREDICATE], model="nobody")).status_code == 404
        assert first.result().status_code == 200
        assert (await post(client, [PREDICATE])).status_code == 200


async def test_a_question_too_long_refuses_all_of_them_and_holds_no_place(
    models: Catalog, engines: ScriptedEngines
) -> None:
    too_long = {**PREDICATE, "instructions": "x" * 20_000}
    async with served(models, engines, queue_limit=4) as client:
        for questions in ([too_long, PREDICATE, PREDICATE], [PREDICATE, PREDICATE, too_long]) * 2:
            error = error_of(await post(client, questions))
            assert (error["param"], error["code"]) == ("questions", "context_length_exceeded")
        assert (await post(client, [PREDICATE] * 4)).status_code == 200


async def test_a_client_that_leaves_takes_its_questions_along(
    models: Catalog, engines: ScriptedEngines
) -> None:
    engines.chat.gate.close()
    async with served(models, engines, queue_limit=4) as client:
        with pytest.raises(httpx2.ReadTimeout):
            await client.post("/v1/decisions", json=ask([PREDICATE] * 4), timeout=0.3)
        engines.chat.gate.open()
        async with asyncio.timeout(60):
            while (await post(client, [PREDICATE])).status_code != 200:
                await asyncio.sleep(0.02)
