"""What a gateway's /metrics says of itself: what must come back to zero, and memory."""

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


@dataclass(frozen=True)
class Reading:
    """Series by name, summed over their labels."""

    values: Mapping[str, float]

    @property
    def work(self) -> dict[str, int]:
        """What is zero when nobody asks for anything."""
        return {noun: int(self.values[name]) for noun, name in WORK.items()}

    @property
    def tasks(self) -> int:
        """The event loop's tasks."""
        return int(self.values["gateway_tasks"])

    @property
    def resident_bytes(self) -> int:
        """The process's memory, as the system counts it."""
        return int(self.values["process_resident_memory_bytes"])

    @property
    def active_bytes(self) -> int:
        """The arrays there are."""
        return int(self.values["gateway_device_active_bytes"])

    @property
    def cached_bytes(self) -> int:
        """What was freed, and is kept for reuse."""
        return int(self.values["gateway_device_cached_bytes"])

    @property
    def held_bytes(self) -> int:
        """What of the budget is given away."""
        return int(self.values["gateway_budget_held_bytes"])

    @property
    def limit_bytes(self) -> int:
        """The budget."""
        return int(self.values["gateway_budget_limit_bytes"])

    @property
    def cancelled(self) -> int:
        """Requests whose caller left, wherever they stood."""
        return int(self.values["gateway_cancelled_total"])

    @property
    def descriptors(self) -> int:
        """Files and sockets that are open."""
        return int(self.values["process_open_fds"])

    def told(self, later: "Reading") -> list[str]:
        """Say what has become of each number."""
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
    return Reading(values)


async def settled(url: str, tasks: int | None = None) -> Reading:
    """Read, over a connection of its own, until all work is done and no more tasks are left than
    so many, or it has taken too long.
    """
    deadline = asyncio.get_running_loop().time() + SETTLING_S
    while True:
        async with httpx2.AsyncClient(base_url=url, timeout=30) as client:
            now = await reading(client)
        is_calm = not any(now.work.values()) and (tasks is None or now.tasks <= tasks)
        if is_calm or asyncio.get_running_loop().time() > deadline:
            return now
        await asyncio.sleep(0.1)
