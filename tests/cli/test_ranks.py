"""One model over two ranks: its answers, and the end of a group that has lost one."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from anyio.from_thread import BlockingPortal
from structlog.testing import capture_logs

from gateway.app.engines import MlxEngines
from gateway.registry import load_catalog
from tests.checkpoints import write_chat
from tests.processes import command, environment, free_ports
from tests.serving_app import served, settings

pytestmark = pytest.mark.slow

LAUNCH = Path(sys.executable).with_name("mlx.launch")
SCALING = Path(__file__).parents[2] / "docs" / "scaling.md"
MODELS = """
version: 1
models:
  tensor: {kind: chat, source: "path:llama", parallel: tensor, preload: true}
  pipeline: {kind: chat, source: "path:qwen2", parallel: pipeline, preload: true}
  packed-tensor: {kind: chat, source: "path:wide", parallel: tensor, kv_bits: 8}
  packed-pipeline: {kind: chat, source: "path:wider", parallel: pipeline, kv_bits: 4}
  odd: {kind: chat, source: "path:odd", parallel: tensor}
  llama: {kind: chat, source: "path:llama", parallel: pipeline}
"""
ONE_MODEL = """
version: 1
models:
  tensor: {kind: chat, source: "path:llama", parallel: tensor, preload: true}
"""
PIPE_BYTES = 2 * 65_536
NO_END = {"2": -100}
SHAPE = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["on", "size"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "size", "strict": True, "schema": SHAPE}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with models.yaml and tiny models: one each way, one with an odd head."""
    folder = tmp_path_factory.mktemp("ranks")
    write_chat(folder / "llama")
    write_chat(folder / "qwen2", model_type="qwen2", num_hidden_layers=3)
    write_chat(folder / "wide", head_dim=32)
    write_chat(folder / "wider", model_type="qwen2", hidden_size=128, num_hidden_layers=3)
    write_chat(folder / "odd", num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
    (folder / "models.yaml").write_text(MODELS)
    (folder / "one.yaml").write_text(ONE_MODEL)
    return folder


def address(log: Path) -> str:
    """Give where rank 0 serves; the ranks and the ring write into each other's lines."""
    found = re.search(r'"url":"([^"]+)"', log.read_text())
    assert found, log.read_text()
    return found[1]


@dataclass(frozen=True)
class Group:
    """The processes of two ranks and their logs; rank 0 serves at `url`."""

    ranks: list["subprocess.Popen[bytes]"]
    logs: list[Path]

    @property
    def url(self) -> str:
        return address(self.logs[0])

    @property
    def is_starting(self) -> bool:
        """Return True until all models that are preloaded are loaded, or one cannot be."""
        return not {"ready", "not_ready"} & {*self.events(0)}

    def events(self, rank: int) -> list[str]:
        """List the events in a rank's log; the ring writes to it too, also into lines of ours."""
        return re.findall(r'"event":"(\w+)"', self.logs[rank].read_text())


@contextmanager
def group(
    folder: Path, logs: Path, models: tuple[str, str] = ("one.yaml", "one.yaml")
) -> Iterator[Group]:
    """Start two ranks as mlx.launch does with its ring; wait until rank 0 has preloaded."""
    hosts = logs / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    files = [logs / f"rank-{rank}" for rank in range(2)]
    given = {"GATEWAY_PORT": "0", "GATEWAY_LOG_FORMAT": "json", "MLX_HOSTFILE": str(hosts)}
    ranks = []
    for rank, file in enumerate(files):
        with file.open("wb") as output:
            ranks.append(
                subprocess.Popen(
                    command("serve", "--models", models[rank]),
                    cwd=folder,
                    env=environment(**given, MLX_RANK=str(rank)),
                    stderr=output,
                )
            )
    served = Group(ranks, files)
    try:
        while served.is_starting:
            assert {each.poll() for each in ranks} == {None}, [each.read_text() for each in files]
            time.sleep(0.1)
        yield served
    finally:
        for each in ranks:
            each.kill()
            each.wait(60)


def chat(model: str, words: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": words}],
        "temperature": 0,
        "max_tokens": 12,
        **fields,
    }


QUESTIONS = [
    chat(model, words, logit_bias=NO_END)
    for model in ("tensor", "pipeline", "packed-tensor", "packed-pipeline")
    for words in ("Hello", "Where is the library? " * 20, "How are you")
] + [
    chat("tensor", "Hello", temperature=1, seed=7),
    chat("tensor", "Hello", logprobs=True, top_logprobs=2, max_tokens=5),
    chat("tensor", "A size", max_tokens=20, response_format=FORM),
]


def ask(url: str, body: dict[str, Any]) -> str:
    answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    assert "choices" in answer, answer
    return str(answer["choices"][0]["message"]["content"])


def texts(url: str) -> list[str]:
    """Ask all at once, while another client leaves in the middle of its answer."""

    def leave(model: str) -> str:
        body = chat(model, "Leaving", max_tokens=500, stream=True, logit_bias=NO_END)
        with httpx2.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
            return next(answer.iter_lines())

    with ThreadPoolExecutor(16) as pool:
        left = [pool.submit(leave, model) for model in ("tensor", "pipeline")]
        answers = [pool.submit(ask, url, body) for body in QUESTIONS]
        assert all(each.result().startswith("data: ") for each in left)
        return [each.result() for each in answers]


@contextmanager
def launched(folder: Path, logs: Path) -> Iterator[str]:
    """Start two ranks as docs/scaling.md does; yield where they serve."""
    log = logs / "log"
    port = free_ports(2)[0]  # a rank each, from the first on
    [line] = re.findall(r"^mlx\.launch -n .*$", SCALING.read_text(), re.MULTILINE)
    ours, _, theirs = line.partition(" -- ")
    assert theirs == "mlx-gateway serve"
    options = [*ours.split()[1:], "--starting-port", str(port), "--"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(LAUNCH), *options, *command("serve")],
            cwd=folder,
            env=environment(
                GATEWAY_PORT="0", GATEWAY_LOG_FORMAT="json", GATEWAY_CACHE_MAX_MODELS="8"
            ),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
        )
    try:
        # It hands its input on, and asks without a pause whether the ranks could take more; these
        # read none, and their pipes take no more than this.
        assert process.stdin is not None
        process.stdin.write(bytes(PIPE_BYTES))
        process.stdin.flush()
        while '"event":"ready"' not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield address(log)
    finally:
        children = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
        )
        for child in children.stdout.split():
            os.kill(int(child), signal.SIGTERM)  # either asks for the whole group's end
        try:
            process.wait(60)
        finally:
            process.kill()
            process.communicate()
        assert log.read_text().count('"event":"group_ended"') == 1, log.read_text()


def test_two_ranks_answer_as_one(portal: BlockingPortal, folder: Path, tmp_path: Path) -> None:
    """Tensor and pipeline, many at once: greedy, sampled, scored, held to a schema, of KV in fewer
    bits. Two of the models are loaded while the others answer.
    """
    given = settings(cache_max_models=8)
    models = load_catalog(folder / "models.yaml", {})
    gateway = served(models, MlxEngines(given), cache_max_models=8)
    with capture_logs() as logged, portal.wrap_async_context_manager(gateway) as alone:
        expected = texts(str(alone.base_url).rstrip("/"))
    assert [each["event"] for each in logged].count("parallel_alone") == 4
    with launched(folder, tmp_path) as url:
        assert texts(url) == expected
        refused = [
            httpx2.post(f"{url}/v1/chat/completions", json=chat(model, "Hello"), timeout=60)
            for model in ("odd", "llama")
        ]
        again = [ask(url, body) for body in QUESTIONS[::6]]
    assert again == expected[::6]
    assert set(json.loads(expected[-1])) == {"on", "size"}
    assert len(set(expected[:12])) == 12
    messages = [each.json()["error"]["message"] for each in refused]
    assert [each.status_code for each in refused] == [500, 500], messages
    assert "num_attention_heads, 3, cannot be divided among 2 ranks" in messages[0]
    assert "use `parallel: tensor`" in messages[1]


def first_line(url: str, tokens: int = 2000) -> "tuple[ExitStack, Iterator[str]]":
    """Begin a long stream; give its lines after the first."""
    stack = ExitStack()
    body = chat("tensor", "Long", max_tokens=tokens, stream=True, logit_bias=NO_END)
    answer = stack.enter_context(
        httpx2.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60)
    )
    lines = answer.iter_lines()
    assert next(lines).startswith("data: ")
    return stack, lines


def test_a_rank_that_dies_ends_the_group(folder: Path, tmp_path: Path) -> None:
    """Answers under way end with an error, rank 0's log says why, and its status is 70."""
    with group(folder, tmp_path) as served:
        stack, lines = first_line(served.url)
        with stack:
            served.ranks[1].kill()
            *_, last = [line for line in lines if line]
        assert served.ranks[0].wait(30) == 70
        assert "error" in json.loads(last.removeprefix("data: "))
        assert "rank_lost" in served.events(0)


def test_a_rank_0_that_dies_ends_the_others(folder: Path, tmp_path: Path) -> None:
    """The others end even in the middle of a pass, which would never finish."""
    with group(folder, tmp_path) as served:
        stack, lines = first_line(served.url)
        with stack:
            served.ranks[0].kill()
            with pytest.raises(httpx2.RemoteProtocolError):
                list(lines)
        assert served.ranks[1].wait(30) == 70
        assert served.events(1)[-1] == "leader_lost"


def test_ranks_refuse_to_load_unlike_models_and_drain_when_one_is_told_to_stop(
    folder: Path, tmp_path: Path
) -> None:
    """They serve the models they have alike, and the answers under way are whole."""
    changed = MODELS.replace('"path:qwen2",', '"path:qwen2", dtype: float16,')
    assert changed != MODELS
    (folder / "changed.yaml").write_text(changed)
    with group(folder, tmp_path, models=("models.yaml", "changed.yaml")) as served:
        url = f"{served.url}/v1/chat/completions"
        refused = httpx2.post(url, json=chat("pipeline", "Hello"), timeout=60)
        message = refused.json()["error"]["message"]
        assert "rank 1: " in message
        assert "its models.yaml differs from that of rank 0" in message
        stack, lines = first_line(served.url, tokens=60)
        with stack:
            served.ranks[1].send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert [each.wait(60) for each in served.ranks] == [0, 0]
        assert served.events(1)[-1] == "group_ended"
