"""A gateway's own figures in /metrics: those that must come back to zero, and memory."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import httpx2
from prometheus_client.parser import text_string_to_metric_families

WORK = {
    "rows": "gateway_rows",
    "tickets": "gateway_tickets",
    "leases": "gateway_leases",
    "requests": "gateway_queue_depth",
    "tokens": "gateway_queue_tokens",
}
SETTLING_S = 20


NUMBERS = {
    "tasks": "gateway_tasks",
    "resident_bytes": "process_resident_memory_bytes",
    "active_bytes": "gateway_device_active_bytes",
    "cached_bytes": "gateway_device_cached_bytes",
    "held_bytes": "gateway_budget_held_bytes",
    "limit_bytes": "gateway_budget_limit_bytes",
    "cancelled": "gateway_cancelled_total",
    "descriptors": "process_open_fds",
}


@dataclass(frozen=True)
class Reading:
    """Series by name, summed over their labels; `work`, zero when nobody asks; and NUMBERS."""

    values: Mapping[str, float]
    work: Mapping[str, int]
    tasks: int
    resident_bytes: int
    active_bytes: int
    cached_bytes: int
    held_bytes: int
    limit_bytes: int
    cancelled: int
    descriptors: int

    def told(self, later: "Reading") -> list[str]:
        """Describe the change of each number."""
        names = ("resident_bytes", "active_bytes", "held_bytes", "tasks", "descriptors")
        pairs = ((name, getattr(self, name), getattr(later, name)) for name in names)
        lines = [f"  {name} {before:,} → {after:,}" for name, before, after in pairs]
        return [*lines, f"  cancelled {later.cancelled - self.cancelled}, left {later.work}"]


async def reading(client: httpx2.AsyncClient) -> Reading:
    """Read them now."""
    values: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        for sample in family.samples:
            values[sample.name] += sample.value
    work = {noun: int(values[name]) for noun, name in WORK.items()}
    return Reading(values, work, **{noun: int(values[name]) for noun, name in NUMBERS.items()})


async def settled(url: str, tasks: int | None = None) -> Reading:
    """Read until all work is done and at most `tasks` tasks are left, or for SETTLING_S seconds.

    Each reading has a connection of its own.
    """
    deadline = asyncio.get_running_loop().time() + SETTLING_S
    while True:
        async with httpx2.AsyncClient(base_url=url, timeout=30) as client:
            now = await reading(client)
        is_calm = not any(now.work.values()) and (tasks is None or now.tasks <= tasks)
        if is_calm or asyncio.get_running_loop().time() > deadline:
            return now
        await asyncio.sleep(0.1)
