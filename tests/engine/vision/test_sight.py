"""Rows with images answer as each does alone, whoever joins, waits or leaves meanwhile."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.engine.device import DeviceBounds
from gateway.engine.generation.engine import GenerationEngine
from gateway.jobs.chat import GenerateJob, Sampling
from tests.engine.generation.harness import Answer, Rows, answers, cached, ids
from tests.engine.vision.harness import (
    CAT,
    COW,
    DOG,
    FREE,
    LARGE,
    SEEDED,
    TALL,
    WIDE,
    alone,
    keep_features,
    open_seeing,
    see,
    sight_of,
)

JOBS: list[Callable[[Sampling], GenerateJob]] = [
    lambda drawn: see("What is @?", CAT, sampling=drawn),
    lambda drawn: see("What is @?", DOG, sampling=drawn),
    lambda drawn: see("Which of them is asleep, @ or @?", WIDE, CAT, sampling=drawn),
    lambda drawn: see("Hello, how are you? " * 4, sampling=drawn),
    lambda drawn: see("@@", TALL, LARGE, sampling=drawn),
    lambda drawn: see("@ and the same again: @, is it?", COW, COW, sampling=drawn),
    lambda drawn: see("Hi", sampling=drawn),
]
LONG = "It lies on the mat and purrs. " * 3  # over a block of the prefix cache


@pytest.fixture(scope="module")
def told(cold: GenerationEngine) -> dict[int, list[Answer]]:
    """Return the answer of each job alone, by the id of its sampling: greedy and drawn."""
    return {
        id(sampling): [alone(cold, job(sampling))[0] for job in JOBS] for sampling in (FREE, SEEDED)
    }


@pytest.fixture(scope="module")
def busy(folder: Path) -> Iterator[GenerationEngine]:
    """Load an engine for made-up orders, in which the tower yields as often as it can."""
    engine = open_seeing(folder, bounds=DeviceBounds(pass_s=1e-9))
    yield engine
    engine.close()


@pytest.fixture
def slow(folder: Path) -> Iterator[GenerationEngine]:
    """Load an engine whose passes are as short as can be, with the smallest room for features."""
    engine = open_seeing(folder, bounds=DeviceBounds(pass_s=1e-9))
    keep_features(engine, 0)
    yield engine
    engine.close()


def test_each_image_has_an_answer_of_its_own(told: dict[int, list[Answer]]) -> None:
    """Otherwise the comparisons below would show nothing."""
    for each in told.values():
        assert len({tuple(answer.ids) for answer in each}) == len(JOBS)


@pytest.mark.parametrize("sampling", [FREE, SEEDED], ids=["greedy", "drawn"])
@pytest.mark.parametrize("budget", [600, 64, 17, 3])
def test_rows_of_a_mixed_batch_answer_as_alone(
    cold: GenerationEngine, told: dict[int, list[Answer]], budget: int, sampling: Sampling
) -> None:
    for expected, answer in zip(
        told[id(sampling)], answers(cold, [job(sampling) for job in JOBS], budget), strict=True
    ):
        assert answer.ids == expected.ids
        assert answer.says_as(expected)


def test_an_image_twice_in_a_prompt_is_encoded_once(cold: GenerationEngine) -> None:
    sight = sight_of(cold)
    keep_features(cold, 1 << 20)
    encoded, recalled = sight.encoded, sight.recalled
    ids(alone(cold, see("@ beside @", CAT, CAT)))
    assert (sight.encoded - encoded, sight.recalled - recalled) == (1, 1)


def test_the_order_of_images_matters(cold: GenerationEngine) -> None:
    one, other = (alone(cold, see("@ or @", *pair)) for pair in ((CAT, DOG), (DOG, CAT)))
    assert ids(one) != ids(other)


def test_the_place_of_an_image_matters(cold: GenerationEngine) -> None:
    one, other = (alone(cold, see(text, CAT)) for text in ("@ Is it a cat?", "Is it a cat? @"))
    assert ids(one) != ids(other)


def test_choices_of_one_request_share_its_image(cold: GenerationEngine) -> None:
    sight = sight_of(cold)
    keep_features(cold, 1 << 20)
    encoded = sight.encoded
    drawn = alone(cold, see("What is @?", CAT, sampling=SEEDED, n=3))
    assert sight.encoded - encoded == 1
    seeds = [SEEDED.seed + i for i in range(3)] if SEEDED.seed is not None else []
    for answer, seed in zip(drawn, seeds, strict=True):
        sampling = Sampling(temperature=1.2, top_p=0.95, seed=seed, ignore_eos=True)
        assert answer.ids == alone(cold, see("What is @?", CAT, sampling=sampling))[0].ids


@pytest.mark.generator(weight=3)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["join", "read", "read", "decode", "park", "preempt", "resume"]),
            st.integers(0, 6),
            st.sampled_from([1, 2, 5, 16, 63, 64, 65, 200, 600]),
        ),
        max_size=25,
    ),
    st.sampled_from([0, 1 << 28]),
)
def test_rows_that_come_wait_and_are_read_anew_answer_as_alone(
    busy: GenerationEngine,
    told: dict[int, list[Answer]],
    acts: list[tuple[str, int, int]],
    room: int,
) -> None:
    """An act names a job by its number; the last rows join once all acts are done."""
    keep_features(busy, room)
    batch, numbers = Rows(busy), dict[int, int]()
    stopped = set[int]()
    try:
        for act, job, budget in [*acts, *(("join", job, 0) for job in range(len(JOBS)))]:
            number = numbers.get(job)
            if act == "join" and number is None:
                [numbers[job]] = batch.add(JOBS[job](FREE))
            elif act == "read" and batch.is_reading:
                batch.hear(batch.prefill(budget))
            elif act == "decode":
                batch.hear(batch.decode())
            elif number is not None and act in ("park", "preempt") and number not in stopped:
                batch.change(**{"parking" if act == "park" else "preempting": [number]})
                stopped.add(number)
            elif number is not None and act == "resume" and number in stopped:
                batch.change(resuming=[number])
                stopped.remove(number)
        batch.change(resuming=sorted(stopped))
        batch.finish()
    finally:
        batch.leave(*numbers.values())
    assert not batch.faults
    for job, number in numbers.items():
        assert batch.answers[number].ids == told[id(FREE)][job].ids


@pytest.mark.parametrize("leaving", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_row_that_leaves_while_images_are_encoded_takes_no_other_along(
    slow: GenerationEngine, told: dict[int, list[Answer]], leaving: int, steps: int
) -> None:
    """Rows whose images are encoded together are a batch already."""
    batch = Rows(slow)
    rows = [batch.add(job(FREE))[0] for job in JOBS[:3]]
    for _ in range(steps):
        batch.hear(batch.prefill())
    batch.leave(rows[leaving])
    batch.finish()
    for i, row in enumerate(rows):
        answer = batch.answers[row]
        assert answer.ids == ([] if i == leaving else told[id(FREE)][i].ids)


@pytest.mark.parametrize("stopping", [0, 1, 2])
@pytest.mark.parametrize("act", ["parking", "preempting"])
def test_a_row_that_stops_while_images_are_encoded_goes_on_later(
    slow: GenerationEngine, told: dict[int, list[Answer]], act: str, stopping: int
) -> None:
    batch = Rows(slow)
    rows = [batch.add(job(FREE))[0] for job in JOBS[:3]]
    batch.hear(batch.prefill())
    assert batch.size.is_encoding
    batch.change(**{act: [rows[stopping]]})
    batch.finish()
    assert batch.open == [rows[stopping]]
    batch.change(resuming=[rows[stopping]])
    batch.finish()
    for expected, row in zip(told[id(FREE)], rows, strict=False):
        assert batch.answers[row].ids == expected.ids


def test_rows_that_decode_go_on_between_layers_of_a_tower(
    slow: GenerationEngine, told: dict[int, list[Answer]]
) -> None:
    batch = Rows(slow)
    text, image = batch.add(JOBS[6](FREE))[0], 0
    while not batch.is_decoding:
        batch.hear(batch.prefill())
    [image] = batch.add(JOBS[4](FREE))
    order: list[str] = []
    while batch.is_reading:
        batch.hear(batch.prefill())
        order.append("encode" if batch.size.is_encoding else "read")
        deltas = batch.decode()
        batch.hear(deltas)
        order += ["decode" for delta in deltas if delta.id == text]
    between = order[: len(order) - 1 - order[::-1].index("encode")]
    assert between.count("encode") >= 4
    assert "decode" in between[between.index("encode") :]
    batch.finish()
    assert batch.answers[text].ids == told[id(FREE)][6].ids
    assert batch.answers[image].ids == told[id(FREE)][4].ids


def test_a_pass_that_encodes_counts_images_and_no_tokens(cold: GenerationEngine) -> None:
    keep_features(cold, 1 << 20)
    batch = Rows(cold)
    batch.add(see("@ or @ or @", CAT, DOG, CAT))
    batch.hear(batch.prefill())
    size = batch.size
    assert (size.is_encoding, size.encoded, size.recalled) == (True, 2, 1)
    assert (size.tokens, size.padded_tokens) == (0, 0)
    batch.finish()


def test_features_without_room_are_encoded_again_with_the_same_answer(
    cold: GenerationEngine, told: dict[int, list[Answer]]
) -> None:
    sight = sight_of(cold)
    nbytes = cold.nbytes()
    keep_features(cold, 0)
    for _ in range(2):
        encoded = sight.encoded
        assert ids(alone(cold, JOBS[0](FREE))) == [told[id(FREE)][0].ids]
        assert sight.encoded == encoded + 1
    assert cold.nbytes() <= nbytes
    features = 6 * 64 * 4 * 3
    keep_features(cold, features)
    for image in (CAT, DOG, CAT):
        ids(alone(cold, see("What is @?", image)))
        assert sight._kept.nbytes <= features


def test_features_are_freed_when_their_rows_are_read(cold: GenerationEngine) -> None:
    keep_features(cold, 0)
    batch = Rows(cold)
    [row] = batch.add(see("What is @?", CAT))
    while batch.is_reading:
        batch.hear(batch.prefill())
    seq = cold._sequences._find(row)
    assert seq is not None
    assert seq.images is not None
    assert not seq.images.features
    batch.finish()


def test_the_same_image_goes_on_from_the_kept_prompt(warm: GenerationEngine) -> None:
    """No pass of the tower is needed, nor of the tokens before the last block's end."""
    sight = sight_of(warm)
    first = alone(warm, see(f"What is @? {LONG}", CAT))
    encoded = sight.encoded
    sight._kept.clear()
    again = alone(warm, see(f"What is @? {LONG}", CAT))
    assert ids(again) == ids(first)
    assert cached(first) == [0]
    assert cached(again)[0] >= 64
    assert sight.encoded == encoded


def test_a_question_about_the_same_image_reads_its_own_text_alone(
    warm: GenerationEngine, cold: GenerationEngine
) -> None:
    ids(alone(warm, see(f"{LONG} What is @? It is a cat, I think, and here is my reason.", CAT)))
    encoded = sight_of(warm).encoded
    job = see(f"{LONG} What is @? It is a cat, I think, and there is none here but it.", CAT)
    told = alone(warm, job)
    assert ids(told) == ids(alone(cold, job))
    assert cached(told)[0] >= 64
    assert sight_of(warm).encoded == encoded


@pytest.mark.parametrize("text", ["What is @? ", f"{LONG}What is @? "])
def test_another_image_shares_nothing_but_the_text_before_it(
    warm: GenerationEngine, cold: GenerationEngine, text: str
) -> None:
    ids(alone(warm, see(text + LONG, CAT)))
    encoded = sight_of(warm).encoded
    job = see(text + LONG, DOG)
    [params] = warm.prepare(job)
    told = alone(warm, job)
    assert ids(told) == ids(alone(cold, job))
    assert cached(told)[0] <= params.images[0].start
    assert sight_of(warm).encoded == encoded + 1


def test_another_image_within_a_kept_prompt_is_read_anew(
    warm: GenerationEngine, cold: GenerationEngine
) -> None:
    """The first image is kept, and a later one differs."""
    ids(alone(warm, see(f"@ {LONG} @ {LONG}", CAT, DOG)))
    encoded = sight_of(warm).encoded
    job = see(f"@ {LONG} @ {LONG}", CAT, COW)
    told = alone(warm, job)
    assert ids(told) == ids(alone(cold, job))
    assert cached(told)[0] <= warm.prepare(job)[0].images[1].start
    assert sight_of(warm).encoded == encoded + 1  # the features of the first are at hand


def test_a_kept_prompt_that_ends_within_an_image_goes_on_there(
    warm: GenerationEngine, cold: GenerationEngine
) -> None:
    text = "x" * 40 + "@" + "y" * 30
    job = see(text, LARGE)
    span = warm.prepare(job)[0].images[0]
    assert span.start < 64 < span.end
    ids(alone(warm, job))
    told = alone(warm, see("x" * 40 + "@" + "z" * 30, LARGE))
    assert cached(told) == [64]
    assert ids(told) == ids(alone(cold, see("x" * 40 + "@" + "z" * 30, LARGE)))


def test_another_salt_shares_no_prompt_and_encodes_again(warm: GenerationEngine) -> None:
    """The time of an answer tells no caller which images others have sent."""
    sight = sight_of(warm)
    told = [alone(warm, see(f"What is @? {LONG}", CAT, salt=salt)) for salt in ("", "a", "b", "a")]
    assert [cached(each)[0] > 0 for each in told] == [False, False, False, True]
    assert ids(told[0]) == ids(told[1]) == ids(told[2]) == ids(told[3])
    assert sight.encoded == 3


def test_a_burst_of_one_image_encodes_it_once(warm: GenerationEngine) -> None:
    jobs = [see(f"What is @? {LONG} Number {i}.", CAT) for i in range(5)]
    told = answers(warm, jobs)
    assert sight_of(warm).encoded == 1
    assert sum(each > 0 for each in cached(told)) == 4
    assert ids(told) == [ids(alone(warm, job))[0] for job in jobs]


def test_orders_of_joining_and_budgets_change_no_kept_answer(
    warm: GenerationEngine, told: dict[int, list[Answer]]
) -> None:
    for seed in range(4):
        chance = random.Random(seed)
        batch, numbers = Rows(warm), dict[int, int]()
        waiting = chance.sample(range(len(JOBS)), len(JOBS))
        while waiting or batch.is_busy:
            if waiting and chance.random() < 0.5:
                job = waiting.pop()
                [numbers[job]] = batch.add(JOBS[job](FREE))
            if batch.is_reading:
                batch.hear(batch.prefill(chance.randrange(1, 200)))
            batch.hear(batch.decode())
        for job, number in numbers.items():
            assert batch.answers[number].ids == told[id(FREE)][job].ids


def test_an_engine_that_closes_frees_its_tower(folder: Path) -> None:
    engine = open_seeing(folder)
    ids(alone(engine, see("What is @?", CAT)))
    assert sight_of(engine).nbytes > 0
    engine.close()
    with pytest.raises(AttributeError):
        _ = sight_of(engine).nbytes
    mx.clear_cache()
