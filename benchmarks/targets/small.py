"""A near-free model: how many small requests a second; and errors with many connections."""

import re
import shutil
from asyncio.subprocess import PIPE, create_subprocess_exec
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import servers
from benchmarks.targets.rig import MINILM, NEAR_FREE, Rig, rest
from benchmarks.targets.verdicts import Target, Verdict, ratio
from gateway.bench.figures import Figures
from gateway.bench.load import Load, Peer, run_closed_loop

CONNECTIONS = 32
SMALL = Target("near-free model, small requests/s / a bare Starlette and Hypercorn echo", 0.6)
STEPS = (10, 50, 100, 200)
STEADY = Target("10, 50, 100, 200 connections for 20 s each: errors", at_most=0)
# Each run its own texts: they are numbered from a seed on.
SCRIPT = """
local number
function init(args) number = tonumber(args[1]) * 1000000 end
function request()
  number = number + 1
  local body = '{"model": "near-free", "encoding_format": "base64", "input": "the garden '
    .. number .. '"}'
  return wrk.format("POST", nil, {["content-type"] = "application/json"}, body)
end
"""


async def small(rig: Rig) -> list[Verdict]:
    """Load both with wrk, or, where there is none, with our own clients."""
    samples, wrong, rates = [], 0, []
    async with servers.gateway(rig.models) as ours, servers.echo() as echo:
        for number in range(rig.rounds):
            own, own_wrong = await _requests_per_s(rig, ours, number)
            await rest()
            bare, bare_wrong = await _requests_per_s(rig, echo, number)
            await rest()
            wrong += own_wrong + bare_wrong
            samples.append(ratio(own, bare))
            rates.append(own)
    tool = "wrk" if shutil.which("wrk") else "no wrk here: our own clients"
    note = f"{sorted(rates)[len(rates) // 2]:.0f}/s; {tool}"
    return [SMALL.judge(samples, errors=wrong, note=note)]


async def steady(rig: Rig) -> list[Verdict]:
    """MiniLM, one text a request, every answer checked."""
    wrong, told = 0, []
    async with rig.gateway() as peer:
        for clients in STEPS:
            [figures] = await run_closed_loop(
                peer,
                [Load(rig.embeddings(MINILM), clients)],
                warmup_s=0,
                duration_s=rig.seconds(20),
            )
            wrong += sum(figures.errors.values())
            told.append(_told(clients, figures))
    return [STEADY.judge([wrong], note="; ".join(told))]


def _told(clients: int, figures: Figures) -> str:
    p99 = f", p99 {figures.latency.p99 * 1000:.0f} ms" if figures.latency is not None else ""
    return f"{clients}: {figures.requests_per_s:.0f}/s{p99}"


async def _requests_per_s(rig: Rig, url: str, seed: int) -> tuple[float, int]:
    """Give requests a second, and errors."""
    seconds = max(1, round(rig.seconds(4)))
    if shutil.which("wrk"):
        return await _wrk(url, seconds, seed)
    async with Peer(url) as peer:
        [figures] = await run_closed_loop(
            peer,
            [Load(rig.embeddings(NEAR_FREE), CONNECTIONS)],
            warmup_s=seconds / 4,
            duration_s=seconds,
        )
    return figures.requests_per_s, sum(figures.errors.values())


async def _wrk(url: str, seconds: int, seed: int) -> tuple[float, int]:
    with TemporaryDirectory() as folder:
        script = Path(folder) / "small.lua"
        script.write_text(SCRIPT, encoding="utf-8")
        command: Sequence[str] = (
            *("wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-s", str(script)),
            *(f"{url}/v1/embeddings", "--", str(seed + 1)),
        )
        process = await create_subprocess_exec(*command, stdout=PIPE)
        out, _ = await process.communicate()
    return read_wrk(out.decode())


def read_wrk(said: str) -> tuple[float, int]:
    """Read wrk's output: requests a second, and errors of every kind."""
    rate = re.search(r"Requests/sec:\s+([\d.]+)", said)
    assert rate is not None, said
    refused = re.findall(r"Non-2xx or 3xx responses: (\d+)", said)
    broken = re.findall(r"(?:connect|read|write|timeout) (\d+)", said)
    return float(rate[1]), sum(map(int, (*refused, *broken)))
