"""The gains and costs of Ray Serve: `python -m benchmarks.ray_serve`, after `make setup-ray`.

It takes minutes. Where rates are measured, replicas are scripted, with a fixed time a step: of real
models two cores would be the measure. Warm hits are those of demo-chat and its real prefix cache.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from compat_tests.conftest import started as started_alone
from compat_tests.ray.cluster import SCRIPTED, Cluster, running, write_models
from tests.processes import DEMO

STEP_S = 0.02
ANSWER = "sixteen letters."  # a character a step
CLIENTS = 64
REQUESTS = 640
ROWS = 16  # rows of a replica's batch, which bound its rate
LATENCY_REQUESTS = 300
BLOCK = 64  # tokens of a block of the prefix cache
TALKS, TURNS, TALKERS = 24, 5, 4
SENTENCES = 40  # sentences of a conversation's system prompt
WORDS = ("the", "capital", "of", "France", "is", "Paris", "and", "weather", "in", "hello")


@contextmanager
def scripted(replicas: int) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory() as folder:
        source = {"kind": "chat", "source": "hub:x/y", "preload": True}
        models = write_models(Path(folder), {"echo": source})
        options = ("--engines", SCRIPTED, "--replicas", str(replicas))
        settings = {
            "SCRIPTED_STEP_S": str(STEP_S),
            "GATEWAY_GENERATION_MAX_BATCH_SIZE": str(ROWS),
        }
        with running(Path(folder), models, *options, **settings) as cluster:
            cluster.wait_for(replicas)
            yield cluster


def chat(model: str, *texts: str, **more: Any) -> dict[str, Any]:
    roles = ["system", *["user", "assistant"] * len(texts)]
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return {"model": model, "messages": turns, **more}


async def measure_rate(url: str) -> float:
    """Return answered requests a second of CLIENTS at once."""
    async with httpx2.AsyncClient(base_url=url, timeout=120) as client:
        left = iter(range(REQUESTS))

        async def ask() -> None:
            for _ in left:
                body = chat("echo", "be an echo", ANSWER)
                answer = await client.post("/v1/chat/completions", json=body)
                assert answer.json()["choices"][0]["message"]["content"] == ANSWER

        began = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(CLIENTS)))
        return REQUESTS / (time.perf_counter() - began)


def measure_latency(urls: Sequence[str]) -> list[float]:
    """Return the median of a short embeddings request at each address, in milliseconds.

    They are asked in turn, so that the machine's other work is in all of them alike.
    """
    seconds: list[list[float]] = [[] for _ in urls]
    with httpx2.Client(timeout=30) as client:
        for i in range(LATENCY_REQUESTS):
            for url, taken in zip(urls, seconds, strict=True):
                body = {"model": "all-minilm-l6-v2", "input": f"text {i}"}
                began = time.perf_counter()
                assert client.post(f"{url}/v1/embeddings", json=body).status_code == 200
                taken.append(time.perf_counter() - began)
    return [1000 * statistics.median(each) for each in seconds]


async def measure_warmth(url: str) -> float:
    """Hold conversations, each with a long beginning of its own, several at once. Return how many
    of their later turns found all whole blocks of the turn before kept.
    """
    hits, later = 0, 0
    draw = random.Random(0)
    async with httpx2.AsyncClient(base_url=url, timeout=120) as client:
        left = iter(range(TALKS))

        async def talk() -> None:
            nonlocal hits, later
            for _ in left:
                before = 0
                said = [" ".join(draw.choices(WORDS, k=10 * SENTENCES))]
                for turn in range(TURNS):
                    said.append(f"Question {turn}: what is the capital of France?")
                    body = chat("demo-chat", *said, max_tokens=8)
                    answer = (await client.post("/v1/chat/completions", json=body)).json()
                    said.append(answer["choices"][0]["message"]["content"] or "")
                    usage = answer["usage"]
                    if turn:
                        later += 1
                        cached = usage["prompt_tokens_details"]["cached_tokens"]
                        hits += cached >= before - before % BLOCK
                    before = usage["prompt_tokens"]
                    await asyncio.sleep(draw.uniform(0.2, 0.8))  # the reader's time

        await asyncio.gather(*(talk() for _ in range(TALKERS)))
    return hits / later


def main() -> None:
    rates = {}
    for replicas in (1, 2):
        with scripted(replicas) as cluster:
            asyncio.run(measure_rate(cluster.url))  # every path once
            rates[replicas] = asyncio.run(measure_rate(cluster.url))
            print(f"{replicas} replicas: {rates[replicas]:.1f} requests/s", flush=True)
    print(f"2 replicas / 1: {rates[2] / rates[1]:.2f}", flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for alone in ("ray", "alone"):
            (folder / alone).mkdir()
        quiet = {"OMP_NUM_THREADS": "1"}
        with (
            running(folder / "ray", DEMO, "--replicas", "1", **quiet) as cluster,
            started_alone(folder / "alone", DEMO, **quiet) as url,
        ):
            through, direct = measure_latency([cluster.url, url])
    print(f"p50 of an embedding: {through:.2f} ms through, {direct:.2f} ms directly", flush=True)

    for router in ("deploy.ray.router:GatewayRouter", "benchmarks.round_robin:RoundRobin"):
        with tempfile.TemporaryDirectory() as name:
            options = ("--router", router)
            with running(Path(name), DEMO, *options) as cluster:
                cluster.wait_for(2)
                warm = asyncio.run(measure_warmth(cluster.url))
                print(f"{router}: {100 * warm:.0f} % of later turns were warm", flush=True)


if __name__ == "__main__":
    main()
