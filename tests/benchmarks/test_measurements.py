"""The targets' verdicts on measurements: of references that failed, and of slow ones."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from benchmarks.engine_alone import EmbeddingReference, RerankReference, TextsReference
from benchmarks.targets import beside, chatting, embedding, recording, reranking
from benchmarks.targets.__main__ import measured
from benchmarks.targets.rig import MINILM, RERANKER, Rig
from benchmarks.targets.verdicts import Target, Verdict, ratio
from benchmarks.workloads import Wording
from gateway.bench.figures import Answer, Figures, Spread
from gateway.bench.load import Peer
from gateway.bench.requests import embeddings
from tests.fakes import ScriptedEmbedder, ScriptedEngines, ScriptedReranker
from tests.serving_app import catalog, served

GOOD = Figures(10, 10.0, 100.0, Spread(0.02, 0.03, 0.04), None)
LOST = Figures(0, 0.0, 0.0, None, None, {"429 rate_limit_exceeded": 800})
SILENT = replace(LOST, errors={})
BESIDE = beside.Round(GOOD, GOOD, GOOD, GOOD, GOOD, GOOD)
SAID, REFUSED = Answer(0.0, 1.0, (0.5,), 96), Answer(0.0, 1.0, error="404 model_not_found")


def rig(folder: Path, rounds: int = 1) -> Rig:
    return Rig(folder, rounds, 0.1)


def test_nothing_is_measured_against_nothing() -> None:
    assert ratio(1.0, 0.0) is None
    assert ratio(None, 1.0) is None
    verdict = Target("w", 0.9).judge([1.0, None, 1.0], note="a note")
    assert (verdict.value, verdict.is_met) == (None, False)
    assert verdict.note == "not measured: what it is compared with did nothing; a note"
    assert not Target("w", at_most=1).judge([]).is_met


@pytest.mark.parametrize("load", ["idle", "alone", "busy", "waiting", "chat", "asking"])
def test_an_error_of_either_load_meets_no_target(load: str) -> None:
    """Work that is refused beside it leaves more to the other."""
    figures = replace(GOOD, errors={"429 rate_limit_exceeded": 2})
    for verdict in beside.judged([BESIDE, replace(BESIDE, **{load: figures})]):
        assert not verdict.is_met
        assert verdict.note.startswith("2 errors")


@pytest.mark.parametrize("lost", [LOST, SILENT])
def test_a_load_without_its_counterpart_is_not_measured(lost: Figures) -> None:
    for load in ("busy", "idle", "alone"):
        waits, _ = beside.judged([BESIDE, replace(BESIDE, **{load: lost})])
        assert (waits.value, waits.is_met) == (None, False)
    for load in ("asking", "alone"):
        _, shares = beside.judged([BESIDE, replace(BESIDE, **{load: lost})])
        assert (shares.value, shares.is_met) == (None, False)


def test_a_server_that_answers_nothing_is_not_outdone() -> None:
    rounds = [chatting.Round([SAID] * 8, 96.0, [REFUSED] * 8) for _ in range(3)]
    inside, server = chatting.judged(8, rounds)
    assert inside.is_met
    assert (server.value, server.is_met) == (None, False)
    assert server.note.startswith("not measured")
    assert server.note.endswith("it lost 24 of 24 requests")


def test_our_own_wrong_answer_meets_no_target() -> None:
    first = chatting.Round([REFUSED, *[SAID] * 7], 96.0, [SAID] * 8)
    verdicts = chatting.judged(8, [first, replace(first, own=[SAID] * 8)])
    assert [verdict.is_met for verdict in verdicts] == [False, False]


@pytest.mark.parametrize(
    ("call", "at_once", "share"),
    [
        (6.0, 23.0, 1.04),  # 1 ms of overhead a call
        (16.0, 23.0, 1.08),  # each call waits a window out: no gain of the burst
        (16.0, 53.0, 0.47),  # moreover the burst is ten passes
    ],
)
def test_slow_calls_in_turn_are_no_gain(call: float, at_once: float, share: float) -> None:
    """They count as the engine's own 5 ms and HTTP's allowance of 1.2 ms; ten take it 20 ms."""
    found = embedding.gain([call / 1e3] * 10, at_once / 1e3, [0.005] * 10, 0.02)
    assert found == pytest.approx(share, abs=0.005)


@pytest.mark.anyio
async def test_a_measurement_that_fails_is_one_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    async def good(rig: Rig) -> list[Verdict]:
        return [Target("good", 0.9).judge([rig.rounds])]

    async def bad(rig: Rig) -> list[Verdict]:
        raise ZeroDivisionError("division by zero")

    before = signal.getsignal(signal.SIGTERM)
    try:
        verdicts = await measured(rig(tmp_path), {"one": good, "two": bad, "three": good})
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [verdict.is_met for verdict in verdicts] == [True, False, True]
    assert verdicts[1].work == "two"
    assert verdicts[1].note == "not measured: ZeroDivisionError: division by zero"
    assert "Traceback" in capsys.readouterr().err


MODELS = {
    MINILM: {"kind": "embedding", "source": "path:."},
    RERANKER: {"kind": "rerank", "source": "path:."},
}


class Scripted(Rig):
    """A rig whose gateway has scripted engines."""

    __slots__ = ()

    @asynccontextmanager
    async def gateway(self, **environment: str) -> AsyncIterator[Peer]:
        engines = ScriptedEngines(ScriptedEmbedder(max_tokens=1000))
        async with served(catalog(self.folder, MODELS), engines) as client:
            async with Peer(str(client.base_url)) as peer:
                yield peer

    @asynccontextmanager
    async def engine(self, wording: Wording) -> AsyncIterator[TextsReference]:
        if wording.model == RERANKER:
            yield RerankReference(ScriptedReranker(), wording)
        else:
            yield EmbeddingReference(ScriptedEmbedder(), wording, truncate=False)


def counted() -> dict[tuple[str, str], float]:
    """Give every sample of every metric, but those of the process itself."""
    return {
        (sample.name, str(sorted(sample.labels.items()))): sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith("gateway_")
    }


@pytest.mark.anyio
async def test_recording_counts_what_a_request_counts(tmp_path: Path) -> None:

    def changed(before: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
        # a histogram and seconds give their counts only
        return {
            key: value - before.get(key, 0.0)
            for key, value in counted().items()
            if key[0].endswith(("_total", "_count"))
            and key[0] != "gateway_lane_seconds_total"
            and value != before.get(key, 0.0)
        }

    async with Scripted(tmp_path, 1, 1).gateway() as peer:
        assert (await peer.ask(embeddings(MINILM, ["the first loads"]))).error is None
        before = counted()
        assert (await peer.ask(embeddings(MINILM, ["x" * (recording.TOKENS)]))).error is None
        asked = changed(before)
    before = counted()
    recording.record_request()
    assert changed(before) == asked


@pytest.mark.anyio
@pytest.mark.parametrize(
    "measure",
    [recording.recording, embedding.alone, embedding.together, reranking.reranking],
    ids=lambda measure: measure.__name__,
)
async def test_a_measurement_has_a_value_and_no_errors(tmp_path: Path, measure: Any) -> None:
    for verdict in await measure(Scripted(tmp_path, 1, 0.03)):
        assert verdict.value is not None
        assert verdict.value > 0
        assert "errors" not in verdict.note
