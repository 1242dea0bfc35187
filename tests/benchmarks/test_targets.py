"""The targets' verdicts, by numbers; and the servers, models and references they are made with."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import ClientSession

from benchmarks import servers
from benchmarks.batch_generator import BatchReference
from benchmarks.checkpoints import write_chat, write_embedder, write_reranker, write_unpacked
from benchmarks.engine_alone import (
    EmbeddingReference,
    RerankReference,
    open_reference,
)
from benchmarks.llama_cpp import llama_cpp
from benchmarks.targets.onboard import Round, judged
from benchmarks.targets.small import read_wrk
from benchmarks.targets.verdicts import Target, markdown, not_measured
from benchmarks.workloads import PERSON, Form, Wording, chat
from gateway.bench.figures import Answer
from gateway.bench.load import Peer
from gateway.bench.requests import Texts, embeddings
from gateway.registry import load_catalog
from tests.gguf_files import write_model
from tests.serving_app import settings

TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
MODELS = """
version: 1
models:
  chat: {kind: chat, source: "path:chat", preload: true}
  near-free:
    {kind: embedding, source: "path:near-free", pooling: mean, normalize: true, preload: true}
  reranker: {kind: rerank, source: "path:reranker"}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write both models, the chat model a tiny one, and their models.yaml."""
    folder = tmp_path_factory.mktemp("models")
    write_chat(folder / "chat", **TINY)
    write_embedder(folder / "near-free")
    write_reranker(folder / "reranker")
    (folder / "models.yaml").write_text(MODELS)
    return folder


def wording(model: str, max_tokens: int = 20) -> Wording:
    texts = Texts(3, [12])
    return Wording(
        model=model, texts=texts, texts_per_request=2, prompts=texts, max_tokens=max_tokens
    )


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


def test_wrk_is_read_with_its_errors() -> None:
    said = """
  Latency    11.08ms    8.96ms 108.62ms   90.18%
  3189 requests in 1.00s, 1.02MB read
  Socket errors: connect 1, read 2, write 0, timeout 4
  Non-2xx or 3xx responses: 10
Requests/sec:   3185.86
"""
    assert read_wrk(said) == (3185.86, 17)
    assert read_wrk("Requests/sec:  12.5\n") == (12.5, 0)


@pytest.mark.slow
@pytest.mark.anyio
async def test_random_models_answer_as_long_as_they_are_asked(folder: Path) -> None:
    """Through the gateway, a process of its own that is gone at the end."""
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
async def test_mlx_lms_server_serves_the_same_model(folder: Path) -> None:
    """As many tokens, so that tokens a second can be compared."""
    async with servers.mlx_lm(folder / "chat") as url, Peer(url) as peer:
        answer = await peer.ask(chat("default_model", "hello", max_tokens=30, is_streamed=True))
    assert (answer.error, answer.units) == (None, 30)


@pytest.mark.anyio
async def test_the_echo_answers_as_much_as_the_gateway() -> None:
    """A vector of as many numbers as the near-free model has, in the same envelope."""
    async with servers.echo() as url, Peer(url) as peer:
        answer = await peer.ask(embeddings("near-free", ["one"]))
    assert (answer.error, answer.units) == (None, 1)


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_gguf_file_is_unpacked_into_a_folder_that_mlx_lms_server_serves(
    tmp_path: Path,
) -> None:
    """Its words, as the gateway answers from the file itself."""
    file = write_model(tmp_path / "tiny.gguf")
    unpacked = write_unpacked(file, tmp_path / "folder")
    stored = (tmp_path / "folder" / "model.safetensors").stat().st_size
    assert unpacked.nbytes < stored < 1.01 * unpacked.nbytes
    assert unpacked.encode("hello")
    entry = {"kind": "chat", "source": f"path:{file}", "preload": True}
    (tmp_path / "models.yaml").write_text(json.dumps({"version": 1, "models": {"tiny": entry}}))
    words = []
    async with servers.mlx_lm(tmp_path / "folder") as theirs:
        async with servers.gateway(tmp_path / "models.yaml") as ours:
            for url, model in ((ours, "tiny"), (theirs, "default_model")):
                asked = chat(model, "hello", max_tokens=8)
                async with ClientSession() as session:
                    async with session.post(f"{url}/v1/chat/completions", data=asked.body) as got:
                        words.append((await got.json())["choices"][0]["message"]["content"])
    # random bytes are seldom a character, and mlx-lm's server leaves out what is none
    assert words[0].replace("\ufffd", "") == words[1].replace("\ufffd", "") != ""


@pytest.mark.anyio
async def test_llama_cpp_that_is_not_there_says_so(tmp_path: Path) -> None:
    """Whether it is node that is missing or its package."""
    with pytest.raises(servers.DidNotStart, match="node"):
        async with llama_cpp(tmp_path, tmp_path / "x.gguf", sequences=1, context=64):
            pass


def test_smollm2_is_judged_beside_both_and_by_neither_where_there_is_no_llama_cpp() -> None:
    """The first round, in which each makes its shapes, does not count."""

    def answers(seconds: float) -> list[Answer]:
        return [Answer(0.0, seconds, [], 10)]

    rounds = [Round(answers(9), answers(1), 1.0), *[Round(answers(1), answers(2), 5.0)] * 3]
    beside, server = judged(8, rounds)
    assert (beside.value, beside.is_met) == (2.0, True)
    assert (server.value, server.is_met) == (2.0, True)
    alone, _ = judged(8, [replace(each, llama=None) for each in rounds])
    assert not alone.is_met
    assert "no node-llama-cpp" in alone.note


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("version: 1\nmodels: {a: {kind: chta}}\n")
    with pytest.raises(servers.DidNotStart, match="chta"):
        async with servers.gateway(tmp_path / "models.yaml"):
            pass


@pytest.mark.anyio
async def test_engines_count_what_they_make(folder: Path) -> None:
    """Vectors and pairs, of the requests that the server would get."""
    chosen, catalog = (
        settings(models=folder / "models.yaml"),
        load_catalog(folder / "models.yaml", {}),
    )
    words = wording("near-free")
    async with open_reference(chosen, catalog, words) as embedder:
        assert isinstance(embedder, EmbeddingReference)
        assert embedder.run(3) == 6
        assert embedder.rate(2, 0.01) > 0
        assert embedder.best(0.01).batch in (2, 4, 8, 16, 32, 64)
    words = wording("reranker")
    async with open_reference(chosen, catalog, words) as reranker:
        assert isinstance(reranker, RerankReference)
        assert reranker.run(3) == 6


def test_mlx_lms_generator_makes_every_token(folder: Path) -> None:
    """None of its rows ends before the others."""
    reference = BatchReference.tuned(folder / "chat")
    assert reference.rate(["hello", "and good bye"], 10) > 0


@pytest.mark.slow
@pytest.mark.anyio
async def test_mlx_lms_generator_answers_lines_on_the_blas_that_mlx_comes_with(
    folder: Path,
) -> None:
    """What imports the gateway's engine has loaded another."""
    told = "import atexit, json, runpy, sys; sys.argv = [None, *sys.argv[1:]]\n" + (
        "atexit.register(lambda: print(json.dumps({'gateway': 'gateway.engine' in sys.modules})))\n"
        "runpy.run_module('benchmarks.batch_generator', run_name='__main__')"
    )
    command = (sys.executable, "-c", told, folder / "chat")
    async with servers.worker(*command, folder=servers.CHECKOUT) as generator:
        assert (await generator.ask({"prompts": ["hello", "bye"], "tokens": 3}))["rate"] > 0
        assert await generator.ask({"prompts": "of none"}) == {"gateway": False}
