"""A real Prometheus scrapes a gateway that had traffic of all kinds.

It is then asked the expressions of the board and the alerts.
"""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from gateway.errors import ModelLoadFailed
from tests.deploy.promql import ALERTS, EXPRESSIONS, FOLDER, wanted
from tests.fakes import ScriptedEngines
from tests.processes import free_port
from tests.serving_app import catalog, served

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        PROMETHEUS is None or PROMTOOL is None,
        reason="prometheus and promtool are not installed (Debian's package prometheus has both)",
    ),
]
MODELS: dict[str, dict[str, Any]] = {
    "writer": {"kind": "chat", "source": "path:."},
    "broken": {"kind": "chat", "source": "path:."},
    "embedder": {"kind": "embedding", "source": "path:."},
    "judge": {"kind": "rerank", "source": "path:."},
}


@pytest.mark.parametrize(
    "arguments",
    [["check", "rules"], ["test", "rules"], ["check", "config"]],
    ids=["rules", "tests", "config"],
)
def test_promtool_takes_what_ships(arguments: list[str]) -> None:
    """The alerts' own tests among it: each has a case in which it fires, and others."""
    files = {"test": "alerts_test.yaml", "rules": "alerts.yaml", "config": "prometheus.yaml"}
    file = files.get(arguments[0]) or files[arguments[1]]
    done = subprocess.run(
        [str(PROMTOOL), *arguments, str(FOLDER / file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def chat(text: str, model: str = "writer", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


async def make_traffic(
    client: httpx2.AsyncClient, engines: ScriptedEngines, scraper: httpx2.AsyncClient
) -> None:
    """Answers of every kind, an error, a rejection and a client who leaves."""
    for _ in range(2):  # the second finds the vector in the cache
        embedded = await client.post("/v1/embeddings", json={"model": "embedder", "input": "a"})
        assert embedded.status_code == 200
    ranked = {"model": "judge", "query": "a", "documents": ["a", "b"]}
    assert (await client.post("/v1/rerank", json=ranked)).status_code == 200
    assert (await client.post("/v1/chat/completions", json=chat("hello"))).status_code == 200
    cut = await client.post("/v1/chat/completions", json=chat("hello", max_tokens=2))
    assert cut.json()["choices"][0]["finish_reason"] == "length"
    engines.chat.script = [{"text": "hi", "tokens": 1, "cached_tokens": 1, "finish_reason": "stop"}]
    assert (await client.post("/v1/chat/completions", json=chat("hello"))).status_code == 200
    engines.chat.script = []
    broken = await client.post("/v1/chat/completions", json=chat("hello", model="broken"))
    assert broken.status_code == 500

    engines.chat.gate.close()
    leaver = asyncio.create_task(client.post("/v1/chat/completions", json=chat("leaves")))
    await asyncio.to_thread(engines.chat.gate.reached.wait, 10)
    rejected = await client.post("/v1/chat/completions", json=chat("one too many"))
    assert rejected.status_code == 429
    leaver.cancel()
    await until(scraper, "gateway_cancelled_total > 0")
    engines.chat.gate.open()


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Run Prometheus as it ships, but of this target and at once; yield its address."""
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text("utf-8"))
    config["global"] = {"scrape_interval": "250ms", "evaluation_interval": "250ms"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    config["scrape_configs"][0]["scrape_timeout"] = "250ms"
    config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    command = [
        str(PROMETHEUS),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield f"http://{address}"
        assert process.poll() is None, log.read_text()
    finally:
        process.terminate()
        process.wait(60)


async def ask(client: httpx2.AsyncClient, path: str, **parameters: str) -> Any:
    answer = await client.get(f"/api/v1/{path}", params=parameters)
    body = answer.json()
    assert body["status"] == "success", body
    return body["data"]


async def problems(client: httpx2.AsyncClient, expression: str) -> list[str]:
    """Evaluate an expression, and list the series and labels that nothing has."""
    await ask(client, "query", query=expression)
    found = []
    for each in wanted(expression):
        series = await ask(client, "series", **{"match[]": each.selector})
        if not series:
            found.append(f"no series {each.selector}")
        labels = {label for labels in series for label in labels}
        found += [f"{each.name} has no label {label}" for label in sorted(each.labels - labels)]
    return found


@asynccontextmanager
async def scraped(folder: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of a Prometheus that has scraped a gateway before and after its traffic."""
    engines = ScriptedEngines()
    engines.failing["broken"] = ModelLoadFailed("broken", "its file is corrupt")
    settings: dict[str, Any] = {"queue_limit": 1, "embedding_cache_size": 10}
    async with served(catalog(folder, MODELS), engines, **settings) as gateway:
        target = f"127.0.0.1:{gateway.base_url.port}"
        with prometheus(folder, target) as url:
            async with httpx2.AsyncClient(base_url=url, verify=False) as client:
                await until(client, 'up{job="mlx-gateway"} == 1')
                await make_traffic(gateway, engines, client)
                await until(client, "count_over_time(gateway_cancelled_total[1m]) > 2")
                yield client


async def until(client: httpx2.AsyncClient, expression: str) -> None:
    """Wait until an expression has a result."""
    async with asyncio.timeout(30):
        while True:
            try:
                if (await ask(client, "query", query=expression))["result"]:
                    return
            except (httpx2.TransportError, ValueError):  # it is not up yet
                pass
            await asyncio.sleep(0.1)


async def test_every_expression_is_answered_from_a_scrape(tmp_path: Path) -> None:
    """Each names metrics and labels that the gateway has; one that does not is noticed."""
    async with scraped(tmp_path) as client:
        found = {name: await problems(client, each) for name, each in EXPRESSIONS.items()}
        assert not {name: each for name, each in found.items() if each}
        for wrong, problem in {
            "rate(gateway_no_such_total[1m])": "no series gateway_no_such_total",
            'gateway_rows{modle="writer"}': 'no series gateway_rows{modle="writer"}',
            "sum by (modle) (gateway_rows)": "gateway_rows has no label modle",
        }.items():
            assert problem in await problems(client, wrong)

        rules = (await ask(client, "rules"))["groups"][0]["rules"]
        assert {rule["name"]: rule["health"] for rule in rules} == {
            rule["alert"]: "ok" for rule in ALERTS
        }
        firing = [rule for rule in rules if rule["name"] == "GatewayErrors"]
        # Other tests of this process have errors of their own, which a new Prometheus counts too.
        alerts = [(each["state"], each["labels"]["status"]) for each in firing[0]["alerts"]]
        assert ("firing", "500") in alerts
