"""What is tried on an engine: one that is right passes, and what is wrong is found by its name."""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.doctor.findings import Finding, Tolerance
from gateway.doctor.trials import (
    STAGES,
    EmbeddingTrial,
    GenerationTrial,
    Golden,
    Rate,
    RerankTrial,
    read_golden,
    run_trial,
)
from gateway.errors import Fault, ModelLoadFailed, PassFault
from gateway.jobs import Pair, Vectors, Verdict
from tests.doctor.engines import Embedder, Writer
from tests.fakes import ScriptedReranker

GOLDEN = Path(__file__).parents[1] / "golden"
MB = 1 << 20
EXACT = Tolerance(logits=1e-2, distance=1e-3, tie_nats=1e-3)


def steady() -> int:
    """Nothing is held, before, while and after."""
    return 0


def writing(
    writer: Writer,
    *,
    knows_paris: bool = True,
    fused: Rate | None = lambda rows: 9.0 * rows,
    keep: Callable[[Verdict], None] = lambda verdict: None,
) -> GenerationTrial:
    return GenerationTrial(
        writer,
        EXACT,
        lambda rows: 10.0 * rows,
        None if fused is None else lambda: nullcontext(fused),
        dtype="float32",
        template_args={},
        prefill_chunk_tokens=512,
        keep=keep,
        knows_paris=knows_paris,
    )


def embedding(embedder: Embedder, *, is_golden: bool = True) -> EmbeddingTrial:
    texts = ["a", "bcd", "ef"]
    right = Embedder()
    golden = Golden("package:right/model", texts, right.embed(right.encode(texts)))
    return EmbeddingTrial(
        embedder, golden, EXACT, lambda count: 100.0, dtype="float32", is_golden=is_golden
    )


def examined(trial: Any, held_bytes: Callable[[], int] = steady) -> dict[str, Finding]:
    """Return what is found, by check."""
    events = run_trial(lambda: trial, held_bytes)
    return {event.check: event for event in events if isinstance(event, Finding)}


def states(found: dict[str, Finding]) -> dict[str, str]:
    return {check: each.state for check, each in found.items() if each.state != "ok"}


def test_the_verdict_of_the_self_test_is_kept() -> None:
    """The gateway reads it at its next start."""
    kept: list[Verdict] = []
    writer = Writer()
    examined(writing(writer, keep=kept.append))
    assert kept == writer.findings


def test_a_writer_that_is_right_passes_all() -> None:
    """And is asked to forget, and closed, at the end."""
    writer = Writer(prefix_bytes=5)
    found = examined(writing(writer))
    assert list(found) == [
        *("load", "batch", "answer", "greedy", "structured", "cancelled"),
        *("speed", "fused", "memory"),
    ]
    assert states(found) == {}
    assert found["greedy"].said == (
        "3 answers of 24 tokens are the same alone and beside 5 rows; a tie is 0.001 nats."
    )
    assert found["speed"].measured == {"tokens_per_s": {"1": 10.0, "8": 80.0}}
    assert (writer.prefix_bytes, writer.rows, writer.is_closed) == (0, 0, True)


def test_fused_projections_are_advised_where_they_are_faster() -> None:
    """With one row and with more; a model that is fused, or has no room beside it, is not tried."""
    for rate, advice in ((12.0, "set it in models.yaml"), (10.1, "leave it out")):
        gain = rate / 10
        found = examined(writing(Writer(), fused=rate.__mul__))
        assert found["fused"].said.endswith(f"{gain:.2f} with 1, {gain:.2f} with 8; {advice}.")
    slower = examined(writing(Writer(), fused=lambda rows: 12.0 if rows == 1 else 70.0))
    assert slower["fused"].measured == {"gains": {"1": 1.2, "8": 0.875}}
    assert slower["fused"].said.endswith("leave it out.")
    assert states(examined(writing(Writer(), fused=None))) == {"fused": "skip"}


def test_rows_run_together_join_late_and_leave() -> None:
    """Four at first; then one leaves and two join."""
    writer = Writer()
    found = examined(writing(writer))
    assert found["cancelled"].measured == {"rows_before": 4, "rows_after": 3, "heard_after": 0}
    assert max(writer.steps) == 5
    assert 4 in writer.steps


def test_an_answer_that_differs_beside_others_fails() -> None:
    """With the first place where it does, and by how much."""
    found = examined(writing(Writer(other="#")))
    assert states(found) == {"greedy": "fail"}
    assert found["greedy"].measured["partings"][0] == {"token": 5, "nats": pytest.approx(9)}


def test_an_answer_that_differs_at_a_tie_passes() -> None:
    """What follows the tie is another answer, and is not compared."""
    found = examined(writing(Writer(other="#", nats=0.0005)))
    assert states(found) == {}
    assert found["greedy"].said.endswith("; a tie is 0.001 nats; 3 parted at one.")


def test_a_batch_whose_logits_differ_fails() -> None:
    """And rows run from then on as the gateway would run them."""
    wrong = Verdict(single=True, rows=False, prefixes=True, window=True, problem="rows: 0.4 apart")
    writer = Writer(findings=[Verdict(single=True), wrong])
    found = examined(writing(writer))
    assert states(found) == {"batch": "fail"}
    assert writer.held == [wrong]


def test_an_invalid_form_fails() -> None:
    """Whether it is no JSON or another object."""
    for form in ('{"name": "Ada"', '{"name": "Ada"}', "Ada"):
        assert states(examined(writing(Writer(form=form)))) == {"structured": "fail"}


def test_a_form_that_is_cut_fails() -> None:
    """It would have gone on for ever."""
    found = examined(writing(Writer(form=" " * 300)))
    assert states(found) == {"structured": "fail"}
    assert not found["structured"].measured["is_whole"]


def test_a_row_that_stays_fails() -> None:
    """It goes on although it was cancelled."""
    found = examined(writing(Writer(keeps_rows=True)))
    assert states(found) == {"cancelled": "fail"}
    assert found["cancelled"].said == "of 4 rows 4 are there after one has left."


def test_a_row_that_speaks_after_it_has_left_fails() -> None:
    """Though it counts no more."""
    found = examined(writing(Writer(hears_the_gone=True)))
    assert states(found) == {"cancelled": "fail"}


def test_nonsense_from_a_model_that_knows_better_fails() -> None:
    """Of another model it is a warning: it may never have heard of Paris."""
    babbler = Writer(knows_paris=False)
    assert states(examined(writing(babbler))) == {"answer": "fail"}
    assert states(examined(writing(babbler, knows_paris=False))) == {"answer": "warn"}


def test_passes_that_failed_and_were_made_again_fail() -> None:
    """Every answer was right in the end, and a user waited twice as long."""
    found = examined(writing(Writer(faults=[PassFault(Fault.UNKNOWN, "3 rows: no")])))
    assert states(found) == {"faults": "fail"}


def test_an_error_of_a_row_fails_its_stages_and_leaves_no_row() -> None:
    """The next stages are tried all the same."""
    writer = Writer(breaks=True)
    found = examined(writing(writer))
    assert states(found) == {"alone": "fail", "together": "fail"}
    assert "NaN" in found["together"].said
    assert (found["speed"].state, writer.rows) == ("ok", 0)


def test_memory_that_stays_fails() -> None:
    """That of rows while nothing runs, and that of the model once it is closed."""

    def held(*counts: int) -> Callable[[], int]:
        return chain(counts, repeat(counts[-1])).__next__

    assert states(examined(writing(Writer()), held(0, 90 * MB, 90 * MB, 0))) == {}
    rows = examined(writing(Writer()), held(0, 90 * MB, 95 * MB, 5 * MB))
    assert states(rows) == {"memory": "fail"}
    assert rows["memory"].said == "5 MiB of its work stay while nothing runs."
    model = examined(writing(Writer()), held(0, 90 * MB, 90 * MB, 3 * MB))
    assert model["memory"].said == "3 MiB of 90 MiB stay after it is closed."


def test_an_embedder_that_is_right_passes_all() -> None:
    """Its vectors are the golden ones."""
    embedder = Embedder()
    found = examined(embedding(embedder))
    assert list(found) == ["load", "vectors", "batch", "speed", "memory"]
    assert states(found) == {}
    assert embedder.is_closed


def test_wrong_vectors_fail() -> None:
    """Those that are wrong alone and together differ from the golden ones only."""
    assert states(examined(embedding(Embedder(is_off=True)))) == {"vectors": "fail"}


def test_vectors_that_differ_in_a_batch_fail() -> None:
    """From the golden ones too, which are compared with a batch."""
    found = examined(embedding(Embedder(is_off_in_batches=True)))
    assert states(found) == {"vectors": "fail", "batch": "fail"}


def test_vectors_that_are_no_numbers_fail() -> None:
    """No distance is one that is allowed."""
    found = examined(embedding(Embedder(is_no_number=True)))
    assert states(found) == {"vectors": "fail", "batch": "fail"}


def test_a_model_without_golden_vectors_skips_them() -> None:
    """And is compared with itself."""
    found = examined(embedding(Embedder(is_off=True), is_golden=False))
    assert states(found) == {"vectors": "skip"}


class Judge(ScriptedReranker):
    """Its logits are off by `wrong` in a batch."""

    wrong = 0.0

    def score(self, rows: Sequence[Pair]) -> Vectors:
        return super().score(rows) + self.wrong * (len(rows) > 1)


@pytest.mark.parametrize(("wrong", "failed"), [(0.0, {}), (0.5, {"batch": "fail"})])
def test_a_reranker_is_compared_with_itself_alone(wrong: float, failed: dict[str, str]) -> None:
    judge = Judge()
    judge.wrong = wrong
    texts = ["Hello", "He", "lo lo", "nothing"]
    trial = RerankTrial(judge, texts, EXACT, lambda count: 10.0 * count, dtype="float32")
    found = examined(trial)
    assert tuple(found) == STAGES["rerank"]
    assert states(found) == failed
    assert judge.is_closed


def test_a_model_that_does_not_load_is_told_in_the_gateways_words() -> None:
    """Nothing else is tried."""

    def fail() -> Any:
        raise ModelLoadFailed("mine", "it has no weights")

    found = list(run_trial(fail, steady))
    assert found[0] == "load"
    assert [each.said for each in found if isinstance(each, Finding)] == [
        "The model `mine` failed to load: it has no weights"
    ]


def test_each_stage_is_told_before_it_begins() -> None:
    """So that a crash is known by where it was."""
    writer = Writer()
    begun: dict[str, int] = {}
    for event in run_trial(lambda: writing(writer), steady):
        if isinstance(event, str):
            begun[event] = len(writer.joined)
    joined = [0, 0, 0, 3, 9, 9, 9]
    assert [*begun.values()] == joined
    assert (*begun,) == STAGES["chat"]


def test_the_golden_vectors_of_the_package_are_those_of_the_tests() -> None:
    """A few of them, in half the bytes."""
    texts: list[str] = json.loads((GOLDEN / "texts.json").read_text("utf-8"))
    vectors = np.load(GOLDEN / "minilm" / "vectors.npy")
    golden = read_golden()
    assert len(golden.texts) >= 5
    for text, vector in zip(golden.texts, golden.vectors, strict=True):
        assert np.abs(vectors[texts.index(text)] - vector).max() < 1e-4
