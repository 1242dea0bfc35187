"""Images beside the other things that a request may ask of a row, and that a model may have."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from gateway.engine.drafts.draft_model import DraftModel
from gateway.engine.drafts.prompt_lookup import PromptLookup
from gateway.engine.generation.engine import GenerationEngine
from gateway.jobs.chat import Adapter, GenerateJob, Sampling
from gateway.jobs.images import FIRST_IMAGE_ID
from gateway.jobs.steps import Verdict
from tests.checkpoints import write_adapter
from tests.engine.generation.harness import (
    PLENTY,
    SCHEMA,
    Answer,
    Rows,
    answers,
    ids,
    load_adapter,
)
from tests.engine.vision.harness import (
    CAT,
    DOG,
    FREE,
    LARGE,
    SEEDED,
    THINK,
    WIDE,
    alone,
    open_seeing,
    see,
    sight_of,
)

TEXT = see("Hello there, how are you?", max_tokens=30)
OPTIONS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 3},
    "grammar": {"grammar": SCHEMA, "max_tokens": 80, "sampling": Sampling(seed=3)},
    "stop": {"stop": ["e", "q", ",", "\n"], "max_tokens": 40},
    "penalties": {
        "sampling": replace(
            SEEDED, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.4
        )
    },
    "min_tokens": {
        "sampling": Sampling(
            temperature=0, min_tokens=6, stop_token_ids=frozenset(range(0, 320, 2))
        )
    },
    "thinking": {
        "template_args": {"enable_thinking": True}, "thinking_budget": 4, "max_tokens": 20,
    },
    "bias": {"sampling": Sampling(temperature=0, logit_bias={40: 90.0})},
    "one token": {"max_tokens": 1, "logprobs": 2},
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_answers_in_a_mixed_batch_as_alone(cold: GenerationEngine, option: str) -> None:
    given = OPTIONS[option]
    jobs = [see("What is @?", CAT, **given), see("Is @ or @ it?", WIDE, DOG, **given)]
    expected = [alone(cold, job)[0] for job in jobs]
    told = answers(cold, [TEXT, *jobs, see("What is it?", **given)], 40)
    for one, other in zip(told[1:3], expected, strict=True):
        assert one.ids == other.ids
        assert one.says_as(other)
        assert one.error is None
    assert expected[0].ids != expected[1].ids or option in ("bias", "grammar")


def test_options_do_what_they_are_for(cold: GenerationEngine) -> None:
    """The comparisons above would hold of options that are not read."""
    told = {name: alone(cold, see("What is @?", CAT, **OPTIONS[name]))[0] for name in OPTIONS}
    assert len(told["logprobs"].logprobs[0].top) == 3
    assert set(json.loads(told["grammar"].text)) == {"a", "b"}
    assert told["stop"].stop is not None
    assert len(told["min_tokens"].ids) >= 6
    assert told["bias"].ids == [40] * 10
    assert cold.tokens.backend.token_to_id(THINK[1]) in told["thinking"].ids[:6]
    assert told["thinking"].reasoning


def test_an_answer_is_that_of_its_prompt_read_at_once(cold: GenerationEngine) -> None:
    """The tower and the decoder are asked apart from batches, caches and chunks."""
    sight = sight_of(cold)
    job = see("Is @ or @ it, or is it @?", CAT, LARGE, WIDE)
    [told] = alone(cold, job, budget=23)
    [params] = cold.prepare(job)
    images = sight.begin(params)
    assert images is not None
    for _ in sight.encode([(images, 0)]):
        pass
    context = [*sight.tokens(params.prompt), *told.ids]
    logits = sight._decoder(mx.array([context]), [images.row], [0])[0]
    likeliest: Any = mx.argmax(logits[len(params.prompt) - 1 : -1], axis=-1).tolist()
    assert told.ids == likeliest


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_with_packed_kv_answer_in_batches_as_alone(folder: Path, bits: int) -> None:
    engine = open_seeing(folder, kv_bits=bits, prefix_cache_bytes=PLENTY)
    jobs = [see("What is @?", CAT), TEXT, see("Is @ or @ it?", WIDE, DOG)]
    expected = [ids(alone(engine, job))[0] for job in jobs]
    assert ids(answers(engine, jobs)) == expected
    assert ids(answers(engine, jobs, 11)) == expected
    engine.close()


@pytest.mark.parametrize("bits", [8])
def test_packed_kv_gives_nearly_the_answer_of_whole_kv(
    folder: Path, cold: GenerationEngine, bits: int
) -> None:
    engine = open_seeing(folder, kv_bits=bits)
    job = see("What is @?", CAT, logprobs=1, max_tokens=1)
    [whole], [packed] = alone(cold, job), alone(engine, job)
    assert packed.ids == whole.ids
    assert packed.chosen == pytest.approx(whole.chosen, abs=0.3)
    engine.close()


def write_lora(folder: Path, base: Path) -> Path:
    """Write an adapter of a seeing model's decoder, by mlx-lm's names of its modules."""
    write_adapter(folder, base, scale=4.0)
    file = str(folder / "adapters.safetensors")
    weights: Any = mx.load(file)
    mx.eval(weights)
    inner = {
        name.replace("model.language_model", "language_model.model"): each
        for name, each in weights.items()
    }
    mx.save_safetensors(file, inner)
    return folder


def test_rows_of_adapters_see_images(folder: Path, tmp_path: Path) -> None:
    engine = open_seeing(folder, prefix_cache_bytes=PLENTY)
    adapter = load_adapter(engine, "tuned", write_lora(tmp_path / "lora", folder))
    adapters: list[Adapter | None] = [None, adapter]
    jobs = [
        replace(see(f"{'It purrs. ' * 8} @", image), adapter=each)
        for each in adapters
        for image in (CAT, DOG)
    ]
    expected = [ids(alone(engine, job))[0] for job in jobs]
    assert len({tuple(each) for each in expected}) == 4
    assert ids(answers(engine, jobs)) == expected
    assert sight_of(engine).encoded == 2  # adapters change the decoder alone
    engine.drop_adapter(adapter.number)
    assert ids(answers(engine, jobs[:2])) == expected[:2]
    engine.close()


def test_rows_one_at_a_time_answer_as_in_batches(folder: Path, cold: GenerationEngine) -> None:
    jobs = [see("What is @?", CAT), TEXT, see("Is @ or @ it?", WIDE, DOG)]
    expected = ids(answers(cold, jobs))
    for verdict in (Verdict(rows=False), Verdict(single=False, prefixes=False)):
        engine = open_seeing(folder, prefix_cache_bytes=PLENTY)
        engine.apply_verdict(verdict)
        assert ids(answers(engine, jobs, 7)) == expected
        engine.close()


def test_a_draft_out_of_the_prompt_ends_before_an_image() -> None:
    image = FIRST_IMAGE_ID + 7
    context = [5, 6, 7, 8, image, image, 9, 5, 6]
    assert PromptLookup().draft(context, 8) == [7, 8]
    assert not PromptLookup().draft([5, 6, image, image, 9, 5, 6], 8)


def conversation(job: GenerateJob, times: int) -> GenerateJob:
    """Let turns without an answer stand before a job's own: the next token has stood there."""
    turns = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": ""}] * times
    return replace(job, messages=[*turns, *job.messages])


def drafting(
    engine: GenerationEngine, jobs: Sequence[GenerateJob]
) -> tuple[list[list[int]], int, int]:
    """Return answers, and the numbers of tokens drafted and accepted."""
    batch, drafted, accepted = Rows(engine), 0, 0
    for job in jobs:
        batch.add(job)
    while batch.is_busy:
        batch.step()
        drafted += batch.size.drafted
        accepted += batch.size.accepted
    assert not batch.faults
    return ids(list(batch.answers.values())), drafted, accepted


@pytest.fixture(scope="module")
def ahead(folder: Path) -> Iterator[GenerationEngine]:
    engine = open_seeing(folder, speculate_rows=6, prefix_cache_bytes=PLENTY)
    yield engine
    engine.close()


def test_drafts_out_of_prompts_with_images_change_no_answer(
    ahead: GenerationEngine, cold: GenerationEngine
) -> None:
    more: dict[str, Any] = {"max_tokens": 60}
    jobs = [
        conversation(see("@ What is it, what is it, what is it?", CAT, **more), 2),
        conversation(see("Is @ or @ it, is @ or @?", WIDE, DOG, WIDE, DOG, **more), 1),
        see("one two one two one two @ one two one two", CAT, **more),
        see("one two one two one two one two", **more),
    ]
    expected = [ids(alone(cold, job))[0] for job in jobs]
    assert drafting(ahead, jobs)[0] == expected
    for job, alone_ids in zip(jobs, expected, strict=True):
        assert drafting(ahead, [job])[0] == [alone_ids]


@pytest.mark.parametrize("errs_at", [1, 3, 1000])
def test_drafts_right_and_wrong_change_no_answer_behind_an_image(
    ahead: GenerationEngine,
    cold: GenerationEngine,
    monkeypatch: pytest.MonkeyPatch,
    errs_at: int,
) -> None:
    """The drafts are of the answers themselves; a wrong one in every `errs_at` tokens."""
    more: dict[str, Any] = {"max_tokens": 40}
    jobs = [see("Is @ or @ it?", LARGE, DOG, **more), see("@", CAT, **more), see("So?", **more)]
    expected = [ids(alone(cold, job))[0] for job in jobs]
    prompts = [list(cold.prepare(job)[0].prompt) for job in jobs]

    def draft(self: PromptLookup, context: Sequence[int], limit: int) -> Sequence[int]:
        for prompt, answer in zip(prompts, expected, strict=True):
            if list(context[: len(prompt)]) == prompt:
                at = len(context) - len(prompt)
                right = list(enumerate(answer[at : at + limit], at))
                return [(token + (i % errs_at == 0)) % 256 for i, token in right]
        return ()

    monkeypatch.setattr(PromptLookup, "draft", draft)
    told, drafted, accepted = drafting(ahead, jobs)
    assert told == expected
    assert drafted > accepted or errs_at == 1000
    assert accepted > 20 or errs_at == 1
    for job, alone_ids in zip(jobs, expected, strict=True):
        assert drafting(ahead, [job])[0] == [alone_ids]


def test_a_draft_model_drafts_for_rows_of_text_alone(
    folder: Path, cold: GenerationEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not read the ids of images."""
    if cold.facts.kv_cost.constant:
        pytest.skip("its states cannot be taken back to before a draft")
    engine = open_seeing(folder, speculate_rows=6, draft=folder, prefix_cache_bytes=PLENTY)
    seen: list[int] = []
    draft = DraftModel.draft

    def watched(
        self: DraftModel, seqs: Mapping[int, Any], rooms: Mapping[int, int]
    ) -> dict[int, Sequence[int]]:
        seen.extend(seqs)
        assert all(token < FIRST_IMAGE_ID for seq in seqs.values() for token in seq.context)
        return draft(self, seqs, rooms)

    monkeypatch.setattr(DraftModel, "draft", watched)
    jobs = [see("What is @?", CAT, max_tokens=30), TEXT, see("Is @ it?", DOG, max_tokens=30)]
    expected = [ids(alone(cold, job))[0] for job in jobs]
    told, drafted, accepted = drafting(engine, jobs)
    assert told == expected
    assert 0 < accepted <= drafted
    assert len({*seen}) == 1
    told, drafted, _ = drafting(engine, [jobs[0]])
    assert told == expected[:1]
    engine.close()


def test_text_alone_is_read_as_by_the_model_without_a_tower(
    folder: Path, cold: GenerationEngine
) -> None:
    [told] = alone(cold, replace(TEXT, logprobs=1))
    [params] = cold.prepare(TEXT)
    model: Any = cold._model
    read = mx.array([[*params.prompt, *told.ids]])
    logits = model(read, cache=make_prompt_cache(model))[0]
    likeliest: Any = mx.argmax(logits[len(params.prompt) - 1 : -1], axis=-1).tolist()
    assert told.ids == likeliest


def test_probes_and_self_tests_run_beside_rows_with_images(cold: GenerationEngine) -> None:
    [expected] = ids(alone(cold, see("What is @?", CAT, max_tokens=12)))
    batch = Rows(cold)
    [row] = batch.add(see("What is @?", CAT, max_tokens=12))
    verdicts = cold.self_test()
    timing = cold.time_step(2)
    steps = 0
    while batch.is_busy:
        batch.step()
        cold.probe()
        next(verdicts, None)
        if steps < 3:
            next(timing)
        steps += 1
    verdicts.close()
    timing.close()
    assert batch.answers[row].ids == expected


def told_of(answer: Answer) -> tuple[list[int], str | None]:
    return answer.ids, answer.error


def test_sampling_defaults_keep_images_apart(cold: GenerationEngine) -> None:
    """Two rows with one seed and other images draw with the same numbers."""
    one, other = answers(cold, [see("What is @?", each, sampling=SEEDED) for each in (CAT, DOG)])
    assert told_of(one) != told_of(other)
    assert told_of(alone(cold, see("What is @?", CAT, sampling=SEEDED))[0]) == told_of(one)
    assert FREE.seed is None
