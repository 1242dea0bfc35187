"""The targets' verdicts, by numbers; and the servers, models and references they are made with."""

import sys
from pathlib import Path

import pytest

from benchmarks import servers
from benchmarks.checkpoints import write_chat, write_embedder
from benchmarks.targets.verdicts import Target, markdown, not_measured
from benchmarks.workloads import PERSON, Form, chat
from gateway.bench.load import Peer
from gateway.bench.requests import embeddings

TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
MODELS = """
version: 1
models:
  chat: {kind: chat, source: "path:chat", preload: true}
  near-free:
    {kind: embedding, source: "path:near-free", pooling: mean, normalize: true, preload: true}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write both models, the chat model a tiny one, and their models.yaml."""
    folder = tmp_path_factory.mktemp("models")
    write_chat(folder / "chat", **TINY)
    write_embedder(folder / "near-free")
    (folder / "models.yaml").write_text(MODELS)
    return folder


@pytest.mark.parametrize(
    ("target", "samples", "is_met"),
    [
        (Target("w", 0.9), [0.8, 0.95, 0.9], True),
        (Target("w", 0.9), [0.8, 0.95, 0.85], False),
        (Target("w", at_most=0.15), [0.1, 0.9, 0.15], True),
        (Target("w", at_most=0), [0.0], True),
        (Target("w", at_most=0), [1.0], False),
    ],
)
def test_the_median_decides(target: Target, samples: list[float], is_met: bool) -> None:
    assert target.judge(samples).is_met is is_met


def test_a_wrong_answer_meets_no_target() -> None:
    verdict = Target("w", 0.9).judge([1.0], errors=2, note="at 32")
    assert not verdict.is_met
    assert verdict.note == "2 errors; at 32"


def test_the_table_says_how_far_the_rounds_were_apart() -> None:
    verdicts = [
        Target("chat", 0.95).judge([0.971, 0.9333, 1.2], note="a note"),
        Target("errors", at_most=0).judge([3]),
        not_measured("prefix", "Traceback\nno port"),
        Target("beside another").judge([0.3]),
    ]
    assert markdown(verdicts).splitlines()[2:] == [
        "| chat | ≥ 0.95 | 0.971 (0.933–1.2); a note | yes |",
        "| errors | ≤ 0 | 3 | no |",
        "| prefix |  | not measured: no port | no |",
        "| beside another |  | 0.3 | – |",
    ]


@pytest.mark.slow
@pytest.mark.anyio
async def test_random_models_answer_as_long_as_they_are_asked(folder: Path) -> None:
    async with servers.gateway(folder / "models.yaml", GATEWAY_STRUCTURED_ROWS="2") as url:
        async with Peer(url) as peer:
            vectors = await peer.ask(embeddings("near-free", ["one text", "another"]))
            free = await peer.ask(chat("chat", "hello", max_tokens=50, is_streamed=True))
            bound = await peer.ask(chat("chat", "hello", max_tokens=500, form=Form(PERSON)))
    assert (vectors.error, vectors.units) == (None, 2)
    assert (free.error, free.units) == (None, 50)
    assert bound.error is None
    async with Peer(url) as peer:
        assert (await peer.ask(embeddings("near-free", ["x"]))).error == "cannot connect"


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("version: 1\nmodels: {a: {kind: chta}}\n")
    with pytest.raises(servers.DidNotStart, match="chta"):
        async with servers.gateway(tmp_path / "models.yaml"):
            pass


@pytest.mark.slow
@pytest.mark.anyio
async def test_mlx_lms_generator_answers_lines_on_the_blas_that_mlx_comes_with(
    folder: Path,
) -> None:
    """A process that imports the gateway's engine has loaded another BLAS."""
    told = "import atexit, json, runpy, sys; sys.argv = [None, *sys.argv[1:]]\n" + (
        "atexit.register(lambda: print(json.dumps({'gateway': 'gateway.engine' in sys.modules})))\n"
        "runpy.run_module('benchmarks.batch_generator', run_name='__main__')"
    )
    command = (sys.executable, "-c", told, folder / "chat")
    async with servers.worker(*command, folder=servers.CHECKOUT) as generator:
        assert (await generator.ask({"prompts": ["hello", "bye"], "tokens": 3}))["rate"] > 0
        assert await generator.ask({"prompts": "of none"}) == {"gateway": False}
