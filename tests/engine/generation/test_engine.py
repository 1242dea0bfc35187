"""The generation engine on real MLX: a tiny llama with random weights."""

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm import load
from mlx_lm.generate import generate_step

from benchmarks.steps import Steps
from gateway.engine.device import Device
from gateway.engine.generation.decode_batch import DecodeBatch
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.models.checkpoint import Checkpoint, read_in_slices, slices
from gateway.engine.models.decoders import open_decoder, parameters
from gateway.errors import BadRequest, ContextLengthExceeded, ModelLoadFailed
from gateway.jobs.chat import Calling, Function, GenerateJob, Sampling
from gateway.jobs.steps import StepPlan
from tests.checkpoints import write_chat
from tests.engine.generation.harness import (
    GREEDY,
    SEEDED,
    TEXTS,
    Passing,
    Rows,
    answers,
    exchange,
    job,
    join,
    newest,
    open_engine,
    shapes,
    spoil,
    watch,
)
from tests.fakes import caller
from tests.simulated_device import TIMEOUT, SimulatedDevice

Reference = dict[str, list[int]]


@pytest.fixture
def engine(folder: Path) -> GenerationEngine:
    return open_engine(folder)


@pytest.mark.parametrize("act", ["parking", "leaving", "clear_prefixes"])
def test_an_error_of_a_step_is_kept_whoever_meets_it(engine: GenerationEngine, act: str) -> None:
    alone = answers(engine, [job(text) for text in TEXTS[:2]])
    with SimulatedDevice().installed() as device:
        run = Rows(engine)
        [first], [second] = (run.add(job(text)) for text in TEXTS[:2])
        for _ in range(3):
            run.step()
        device.fail(TIMEOUT)
        run.change(**{act: True if act == "clear_prefixes" else [first]})
        assert device.failures == 1
        run.step()
        faults = len(run.faults)
        assert faults > 0
        if act == "parking":
            run.change(resuming=[first])
        run.finish()
        assert device.failures == 1
        if act == "parking":
            assert len(run.faults) > faults  # the parked row's own
    expected = {first: alone[0], second: alone[1]}
    for row in expected.keys() - ({first} if act == "leaving" else set()):
        assert run.answers[row].ids == expected[row].ids
        assert run.answers[row].error is None


def test_the_probe_raises_what_the_device_does_and_changes_no_row(engine: GenerationEngine) -> None:
    alone = answers(engine, [job(text) for text in TEXTS[:2]])
    with SimulatedDevice().installed() as device:
        run = Rows(engine)
        for text in TEXTS[:2]:
            run.add(job(text))
        for _ in range(4):
            run.step()
            engine.probe()
        device.fail(TIMEOUT, TIMEOUT)  # the first is of the step under way, and kept for it
        with pytest.raises(RuntimeError, match="Timeout"):
            engine.probe()
        together = run.finish()
    assert [answer.ids for answer in together] == [answer.ids for answer in alone]


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    loaded: Any = load(str(folder))
    model, tokenizer = loaded[0], loaded[1]
    ids: dict[str, list[int]] = {}
    for text in TEXTS:
        messages = [{"role": "user", "content": text}]
        prompt = mx.array(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
        ids[text] = []
        for token, _ in generate_step(prompt, model, max_tokens=24):
            ids[text].append(int(token))
            if token in tokenizer.eos_token_ids:
                break
    assert sum(len(set(each)) for each in ids.values()) > 40, "the model must have things to say"
    return ids


@pytest.mark.parametrize("budget", [16, 100, 512, 100_000])
def test_greedy_tokens_equal_mlx_lms_in_a_mixed_batch(
    engine: GenerationEngine, reference: Reference, budget: int
) -> None:
    for text, answer in zip(TEXTS, answers(engine, [job(t) for t in TEXTS], budget), strict=True):
        assert answer.ids == reference[text]


def test_a_row_can_leave_wherever_it_is(engine: GenerationEngine) -> None:
    run = Rows(engine)
    (waiting,) = run.add(job("a"))
    run.leave(waiting)
    assert not run.is_reading
    (reading,) = run.add(job(TEXTS[4]))
    run.prefill(16)
    run.leave(reading)
    assert not run.is_reading
    (running,) = run.add(job("b"))
    run.step()
    run.leave(running)
    run.leave(running)
    assert (run.count, run.is_decoding) == (0, False)
    assert engine.nbytes() < 1_000_000


@pytest.mark.parametrize("act", ["leaving", "preempting"])
@pytest.mark.parametrize("freeing", [{"clear_prefixes": True}, {"prefix_limit": 0}])
def test_what_leaves_in_the_step_that_frees_memory_is_freed_too(
    folder: Path, act: str, freeing: dict[str, Any]
) -> None:
    run = Rows(open_engine(folder, prefix_cache_bytes=1_000_000))
    [first], [second] = (run.add(job(TEXTS[4])) for _ in range(2))
    while run.is_reading:
        run.step()
    run.leave(second)
    run.change(**{act: [first]}, **freeing)
    assert mx.get_cache_memory() == 0


def test_a_prompt_is_read_in_chunks_of_the_budget(engine: GenerationEngine) -> None:
    steps = Steps(engine)
    (row,) = engine.prepare(job(TEXTS[4]))
    join(steps, row)
    chunks = []
    while steps.is_reading:
        steps.prefill(64)
        chunks.append(steps.size.tokens)
    assert sum(chunks) == len(row.prompt) - 1
    assert set(chunks[:-1]) == {64}


def test_the_end_of_a_prompt_is_read_with_its_last_chunk(engine: GenerationEngine) -> None:
    """It must be at most a quarter of one: a pass of few tokens costs as much as a whole one."""
    steps = Steps(engine)
    (row,) = engine.prepare(job(TEXTS[4]))
    length = len(row.prompt) - 1
    for beyond, passes in ((1, 1), (length // 5, 1), (length // 4, 2)):
        number = join(steps, row)
        before, chunks = steps.count, 0
        while steps.is_reading:
            steps.prefill(length - beyond)
            chunks += 1
        assert (before, chunks) == (1, passes)
        steps.leave(number)


def test_a_short_prompt_overtakes_long_ones(engine: GenerationEngine, reference: Reference) -> None:
    run = Rows(engine)
    long = [run.add(job(TEXTS[4]))[0] for _ in range(3)]
    for _ in range(4):
        run.step(64)
    (short,) = run.add(job(TEXTS[0]))
    for _ in range(4):
        run.step(64)
    assert run.answers[short].tokens > 0
    assert not any(run.answers[row].tokens for row in long)
    run.finish(64)
    assert run.answers[short].ids == reference[TEXTS[0]]
    assert all(run.answers[row].ids == reference[TEXTS[4]] for row in long)


def test_one_token_rows_end_without_a_decode_step(engine: GenerationEngine) -> None:
    """A reranker sends eighty of them at once."""
    run = Rows(engine)
    for _ in range(8):
        run.add(job("Hello", max_tokens=1))
    run.step(10_000)
    assert not run.is_decoding
    ends = {(answer.tokens, answer.finish_reason) for answer in run.answers.values()}
    assert ends == {(1, "length")}


def test_no_row_is_run_on_after_the_last_token_it_may_say(engine: GenerationEngine) -> None:
    """The last token is known as such beforehand: one pass each for five tokens, and for two."""
    passes = shapes(engine)
    told = answers(engine, [job("Hello", max_tokens=5), job("Hello", max_tokens=2)])
    assert [answer.tokens for answer in told] == [5, 2]
    assert [rows for rows, width in passes if width == 1] == [2, 2, 1, 1, 1]


def test_a_row_that_ends_sooner_is_run_on_once_at_most(
    engine: GenerationEngine, reference: Reference
) -> None:
    (eos,) = engine.tokens.answers.eos_ids
    silent = Sampling(temperature=0, logit_bias={eos: 1000.0})
    passes = shapes(engine)
    told = answers(engine, [job("Hello", silent), job(TEXTS[0])])
    assert (told[0].ids, told[0].finish_reason) == ([eos], "stop")
    assert told[1].ids == reference[TEXTS[0]]
    assert [rows for rows, width in passes if width == 1][:3] == [2, 2, 1]


def test_a_seeded_row_repeats_exactly_alone_and_in_a_batch(engine: GenerationEngine) -> None:
    (alone,) = answers(engine, [job("tell me", SEEDED)])
    noisy = Sampling(temperature=1.0)
    batch = answers(engine, [job("x", noisy), job("tell me", SEEDED), job("y", noisy)])
    assert alone.text == batch[1].text


def test_choices_and_rows_without_a_seed_differ(engine: GenerationEngine) -> None:
    free, seeded = Sampling(temperature=2.0), Sampling(temperature=2.0, seed=3)
    assert len({each.text for each in answers(engine, [job("go", free) for _ in range(4)])}) > 1
    once, twice = (
        [each.text for each in answers(engine, [job("go", seeded, n=3)])] for _ in range(2)
    )
    assert once == twice
    assert len(set(once)) == 3
    assert answers(engine, [job("go", seeded)])[0].text == once[0]


def test_stop_strings_never_leak_wherever_they_fall(engine: GenerationEngine) -> None:
    (whole,) = answers(engine, [job(TEXTS[0])])
    stops = [whole.text[start : start + 3] for start in range(1, len(whole.text) - 3)]
    told = answers(engine, [job(TEXTS[0], stop=["never met", stop]) for stop in stops])
    for stop, cut in zip(stops, told, strict=True):
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert (cut.finish_reason, cut.stop) == ("stop", stop)
    assert whole.stop is None


def test_a_bias_forces_and_forbids_tokens_and_foreign_ids_are_ignored(
    engine: GenerationEngine,
) -> None:
    """Clients send the ids of another tokenizer; MLX would not check them."""
    (token,) = engine.tokens.backend.encode("Q", add_special_tokens=False).ids
    forced = Sampling(temperature=0, logit_bias={token: 100.0, 10**9: 100.0, 999_999: -100.0})
    (answer,) = answers(engine, [job("hello", forced, max_tokens=5)])
    (plain,) = answers(engine, [job("hello", max_tokens=5)])
    assert answer.ids == [token] * 5
    foreign = Sampling(temperature=0, logit_bias={10**9: 100.0})
    (ignored,) = answers(engine, [job("hello", foreign, max_tokens=5)])
    assert ignored.ids == plain.ids


def test_max_tokens_is_clamped_to_the_context_and_a_longer_prompt_refused(folder: Path) -> None:
    """Graphiti asks for 16384 tokens of every model."""
    engine = open_engine(folder, max_context=64)
    (row,) = engine.prepare(job("hi", max_tokens=16384))
    assert row.max_tokens == 64 - len(row.prompt)
    (unbounded,) = engine.prepare(job("hi", max_tokens=None))
    assert unbounded.max_tokens == row.max_tokens
    assert (row.is_open, unbounded.is_open) == (False, True)
    with pytest.raises(ContextLengthExceeded, match="64 tokens"):
        engine.prepare(job("long " * 64))
    (answer,) = answers(engine, [job("hi", max_tokens=16384)])
    assert answer.tokens <= row.max_tokens


def test_what_the_template_refuses_is_a_bad_request(engine: GenerationEngine) -> None:
    bad = GenerateJob(
        caller=caller(), messages=[{"role": "oracle", "content": "x"}], sampling=GREEDY
    )
    with pytest.raises(BadRequest, match="oracle"):
        engine.prepare(bad)


@pytest.mark.parametrize(
    "name",
    ["chat_template", "tokenize", "tools", "return_dict", "padding", "messages", "conversations"],
)
def test_a_request_cannot_set_arguments_that_are_not_a_templates(
    engine: GenerationEngine, name: str
) -> None:
    """A template of the caller's own would run as a program, and might never end."""
    with pytest.raises(BadRequest, match=name) as caught:
        engine.prepare(job("x", template_args={name: "{{ 'a' * 10**10 }}"}))
    assert caught.value.part == "template_args"


def test_a_step_that_raises_ends_the_guilty_row_only(
    engine: GenerationEngine, reference: Reference
) -> None:
    guilty = TEXTS[0]
    poison = reference[guilty][5]

    def check(tokens: mx.array) -> None:
        if tokens.shape[1] == 1 and (tokens == poison).any().item():
            raise RuntimeError("poisoned token")

    sound = watch(engine, check)
    told = dict(zip(TEXTS, answers(engine, [job(text) for text in TEXTS]), strict=True))
    failed = {text for text, answer in told.items() if answer.error}
    assert guilty in failed
    assert len(failed) < len(TEXTS)
    for text in set(TEXTS) - failed:
        assert told[text].ids == reference[text]
    exchange(engine, sound)
    assert answers(engine, [job(guilty)])[0].ids == reference[guilty]


@pytest.mark.parametrize("at", [1, 3, 9])
def test_a_passing_fault_changes_no_answer(
    engine: GenerationEngine, folder: Path, reference: Reference, at: int
) -> None:
    exchange(engine, Passing(engine._model, at))
    told = answers(engine, [job(text) for text in TEXTS] + [job("tell me", SEEDED)], 100)
    for text, answer in zip(TEXTS, told, strict=False):
        assert answer.error is None
        assert answer.ids == reference[text]
    (seeded,) = answers(open_engine(folder), [job("tell me", SEEDED)])
    assert told[-1].text == seeded.text


@pytest.mark.parametrize("at", range(1, 9))
def test_what_has_met_its_stop_string_is_not_read_again(engine: GenerationEngine, at: int) -> None:
    """It gets no further delta, either, when the pass after it goes wrong."""
    (whole,) = answers(engine, [job("Hello there!", max_tokens=3)])
    exchange(engine, Passing(engine._model, at))
    stopping = job("Hello there!", stop=[whole.deltas[2]])
    stopped, bounded = answers(engine, [stopping, job("x", max_tokens=3)])
    assert (stopped.finish_reason, stopped.tokens) == ("stop", 3)
    assert (bounded.finish_reason, bounded.tokens) == ("length", 3)


def test_a_row_whose_text_breaks_ends_alone(engine: GenerationEngine, reference: Reference) -> None:
    run = Rows(engine)
    (broken,) = run.add(job(TEXTS[0]))

    def snap(token: int) -> str:
        raise RuntimeError("snapped")

    newest(engine)._output.decoder.push = snap  # type: ignore[method-assign]
    (fine,) = run.add(job(TEXTS[3]))
    run.finish()
    assert "snapped" in (run.answers[broken].error or "")
    assert run.answers[fine].ids == reference[TEXTS[3]]


def test_output_that_is_no_number_is_an_error_that_says_so(tmp_path: Path) -> None:
    folder = write_chat(tmp_path)
    spoil(folder, "model.norm.weight", math.nan)
    for answer in answers(open_engine(folder), [job("hi", max_tokens=n) for n in (1, 5)]):
        assert "not a number" in (answer.error or "")


def test_a_template_from_models_yaml_takes_the_place_of_the_models(folder: Path) -> None:
    template = "{{ greeting }} {{ messages[0].content }}"
    engine = open_engine(folder, chat_template=template, template_args={"greeting": "Yo"})
    (row,) = engine.prepare(job("you"))
    assert engine.tokens.backend.decode(list(row.prompt)) == "Yo you"


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("tokenizer.json", "tokenizer.json"),
        ("config.json", "config.json"),
        ("model.safetensors", "safetensors"),
        ("chat_template.jinja", "chat_template"),
    ],
)
def test_a_missing_or_truncated_file_is_named(tmp_path: Path, file: str, reason: str) -> None:
    folder = write_chat(tmp_path)
    if file == "model.safetensors":  # half a download is the usual cause
        whole = (folder / file).read_bytes()
        (folder / file).write_bytes(whole[:1000])
        with pytest.raises(ModelLoadFailed, match=r"model\.safetensors"):
            open_engine(folder)
    (folder / file).unlink()
    with pytest.raises(ModelLoadFailed, match=reason):
        open_engine(folder)


def test_an_unknown_architecture_is_named_and_its_own_code_never_run(tmp_path: Path) -> None:
    folder = write_chat(tmp_path)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"llama"', '"never_heard_of"'))
    with pytest.raises(ModelLoadFailed, match="never_heard_of"):
        open_engine(folder)
    (folder / "config.json").write_text('{"model_file": "evil.py", ' + config[1:])
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelLoadFailed, match=r"evil\.py"):
        open_engine(folder)


def test_half_precision_becomes_float32_on_the_cpu(tmp_path: Path) -> None:
    """float32 is ten times as fast there."""
    folder = write_chat(tmp_path)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    halves = {name: array.astype(mx.bfloat16) for name, array in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), halves)
    assert open_engine(folder).nbytes() == 2 * sum(a.nbytes for a in halves.values())


def test_a_step_of_loading_reads_one_slice_of_the_weights(folder: Path) -> None:
    checkpoint = Checkpoint("tiny", folder)
    model, _ = open_decoder(checkpoint, device=Device.CPU, dtype=None)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    steps = list(read_in_slices(checkpoint, parameters(model), slice_bytes=size // 3))
    assert 3 <= len(steps) <= 6


@given(st.lists(st.integers(1, 300), max_size=30), st.integers(1, 200))
def test_a_slice_is_within_its_bytes_or_one_array(sizes: list[int], most: int) -> None:
    arrays = [mx.zeros((size,), dtype=mx.uint8) for size in sizes]
    cut = list(slices(arrays, most))
    assert [id(array) for some in cut for array in some] == [id(array) for array in arrays]
    for some in cut:
        assert some
        assert len(some) == 1 or sum(array.nbytes for array in some) <= most


def test_a_row_that_fails_to_leave_changes_no_other_answer(
    engine: GenerationEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [answer.text for answer in answers(engine, [job(text) for text in TEXTS[:2]])]
    run = Rows(engine)
    [leaving] = run.add(job(TEXTS[3]))
    for text in TEXTS[:2]:
        run.add(job(text))
    for _ in range(4):
        run.step()
    with monkeypatch.context() as patched:
        patched.setattr(DecodeBatch, "keep", no_memory)
        result = engine.step(StepPlan(leaving=[leaving]))
    assert len(result.reading) == 2
    assert result.decoding == 0
    del run.answers[leaving]
    assert [answer.text for answer in run.finish()] == expected
    assert len(run.faults) == 1


def no_memory(*_: Any) -> None:
    raise RuntimeError("no memory to leave with")


@pytest.mark.parametrize("parallel", [True, False])
def test_an_answer_that_may_make_one_call_ends_with_it(tmp_path: Path, parallel: bool) -> None:
    engine = open_engine(write_chat(tmp_path), tool_parser="hermes")
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    script = engine.tokens.backend.encode(call + call, add_special_tokens=False).ids
    start = len(engine.prepare(job("Hi"))[0].prompt)

    def follow_script(logits: mx.array, _: mx.array, cache: Any) -> mx.array:
        place = int(cache[0].size()) - start
        if 0 <= place < len(script):
            logits[:, -1, script[place]] = 1e6
        return logits

    watch(engine, after=follow_script)
    calling = Calling(functions=[Function("look", {"type": "object"})], parallel=parallel)
    [answer] = answers(engine, [job("Hi", max_tokens=len(script), calling=calling)])
    assert [delta.index for delta in answer.calls if delta.name] == [0, 1][: 1 + parallel]
    assert answer.finish_reason == ("length" if parallel else "tool_calls")
