"""`mlx-gateway models recommend`: lists the catalogue's models that fit into a machine's memory.

Memory must have room for the weights, one sequence's KV and the smallest prefix cache. The sequence
is as long as the memory allows, up to the model's context.
"""

import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gateway.cli import lazy
from gateway.cli.terminal import show
from gateway.logs import human_bytes
from gateway.registry import Facts, LayersKept, read_facts
from gateway.serving.budget import LEAST_PREFIXES, bound_prefixes
from gateway.settings import Settings, load_settings

if TYPE_CHECKING:
    from gateway.jobs.steps import KvCost

GIB: Final = 1 << 30
STEP: Final = 1024  # tokens; contexts are shortened in these steps
LEAST_CONTEXT: Final = 4096  # tokens; a shorter context is of little use
HALF: Final = 2  # bytes of a number in the KV cache
# Metal recommends two thirds of a Mac's memory up to 32 GiB, and three quarters of a larger memory.
# Sources: https://github.com/ggml-org/llama.cpp, issues 2048, 5206, 1870. Newer versions of macOS
# recommend a larger share of 128 GiB: https://github.com/antirez/ds4/pull/893.
SMALL_MAC: Final = 32 * GIB
# Words for speeds, by the most bytes of weights that are read to decode one token. Memory bandwidth
# ÷ these bytes limits the tokens per second: https://github.com/ggml-org/llama.cpp/pull/1642.
SPEEDS: Final = ((2_000_000_000, "fast"), (8_000_000_000, "medium"))


@dataclass(frozen=True, slots=True)
class Fit:
    """The memory that a model takes, and the context that fits into it."""

    name: str
    kind: str
    weights_bytes: int
    context: int | None  # tokens: 0 for a model without KV, None if the model does not fit
    is_whole: bool
    kv_bytes: int
    prefix_bytes: int
    token_bytes: int
    verified: str  # the reference that the model's family was compared with
    sees: bool | None  # whether the gateway can send it images; None if unknown

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.prefix_bytes

    @property
    def speed(self) -> str:
        return next((word for most, word in SPEEDS if self.token_bytes <= most), "slow")


def kv_cost(groups: Iterable[LayersKept]) -> "KvCost":
    """Return the cost of a sequence's KV, with one extra layer of each kind, as in `measure_kv`."""
    tokens, states, windows = [0], [0], []
    for group in groups:
        width = group.latent_dim or 2 * group.kv_heads * group.head_dim
        if group.value_heads:
            states += [_state_bytes(group)] * group.layers
        elif group.window:
            windows += [(HALF * width, group.window)] * group.layers
        else:
            tokens += [HALF * width] * group.layers
    windows += [max(windows)] if windows else []
    return lazy.KvCost(
        token=sum(tokens) + max(tokens),
        windows=tuple(windows),
        constant=sum(states) + max(states),
    )


def _state_bytes(group: LayersKept) -> int:
    """Return the bytes that a Gated DeltaNet layer keeps: a float32 state, and 3 tokens' inputs."""
    inputs = (2 * group.key_heads + group.value_heads) * group.head_dim
    return 4 * group.value_heads * group.head_dim**2 + 3 * HALF * inputs


def fit(name: str, kind: str, facts: Facts, memory_bytes: int, settings: Settings) -> Fit | None:
    if facts.weights_bytes is None:
        return None
    weights, active = facts.weights_bytes, facts.active_b or 1
    token_bytes = int(weights * active / (facts.parameters_b or active))
    room = lazy.limits.budget_bytes(settings, memory_bytes) - weights
    context: int | None = 0 if room >= 0 else None
    kv_bytes = prefix_bytes = 0
    if kind == "chat":
        whole, chunk = facts.context or 0, lazy.memory.longest_chunk(settings.prefill_chunk_tokens)
        costs = lazy.memory.RowCosts(kv_cost(facts.kv), chunk_tokens=chunk)

        def row_bytes(tokens: int) -> int:
            return lazy.memory.Layout(single=(tokens,)).nbytes(costs)

        lengths = [*range(LEAST_CONTEXT, whole, STEP), whole]
        count = bisect_right(lengths, room - LEAST_PREFIXES, key=row_bytes)
        context = lengths[count - 1] if count else None
        if context is not None:
            kv_bytes = row_bytes(context)
            prefix_bytes = bound_prefixes(lazy.limits.prefix_share(memory_bytes), room, kv_bytes)
    is_whole = context in (0, facts.context)
    verified = lazy.verified_by({"model_type": facts.architecture})
    sees = facts.images if facts.architecture in lazy.FAMILIES else False
    return Fit(
        name, kind, weights, context, is_whole, kv_bytes, prefix_bytes, token_bytes, verified, sees
    )


def fits(memory_bytes: int, settings: Settings) -> Iterator[Fit]:
    known = [fit(*model, memory_bytes, settings) for model in read_facts()]
    yield from sorted(filter(None, known), key=lambda fit: (fit.kind, -fit.weights_bytes))


def working_set(machine_bytes: int) -> int:
    """Return the most bytes that Metal recommends on a Mac with this memory."""
    return machine_bytes * 2 // 3 if machine_bytes <= SMALL_MAC else machine_bytes * 3 // 4


def _read_memory(text: str) -> int:
    """Return the bytes of a size such as 64GB or 64. Both mean 64 GiB."""
    match = re.fullmatch(r"(\d{1,5}) *(?:GB|GiB|G)?", text.strip(), re.IGNORECASE)
    if match is None or not int(match[1]):
        raise typer.BadParameter(f"{text!r} is not a size such as 64GB", param_hint="--memory")
    return int(match[1]) * GIB


def recommend(
    memory: Annotated[
        str | None,
        typer.Option(help="The memory of a Mac, such as 64GB.", show_default="this machine"),
    ] = None,
) -> None:
    """List models of the catalogue that fit: weights, the KV of one sequence and kept prompts."""
    settings = load_settings({})
    if memory is None:
        memory_bytes = lazy.device.memory_bytes(lazy.device.choose_device(settings.device))
    else:
        memory_bytes = working_set(_read_memory(memory))
        settings = settings.model_copy(update={"cache_max_bytes": None})  # this machine's limit
    budget = human_bytes(lazy.limits.budget_bytes(settings, memory_bytes))
    columns = ("Model", "Kind", "Weights", "Context", "KV", "Kept prompts", "In all")
    found = [_row(fit) for fit in fits(memory_bytes, settings) if fit.context is not None]
    show((*columns, "Speed", "Images", "Verified"), found)
    unsized = [name for name, _, facts in read_facts() if facts.weights_bytes is None]
    unpinned = [name for name, _, facts in read_facts() if "revision" in facts.unread]
    print(f"note: models may take {budget}; sizes unknown: {', '.join(unsized)}", file=sys.stderr)
    print(f"note: the hub's newest revision is used for {', '.join(unpinned)}", file=sys.stderr)


def _row(fit: Fit) -> tuple[str, ...]:
    sizes = (fit.weights_bytes, fit.kv_bytes, fit.prefix_bytes, fit.total_bytes)
    context = f"{fit.context:,}{'' if fit.is_whole else ' (cut)'}" if fit.context else ""
    weights, kv, kept, total = (human_bytes(size) if size else "" for size in sizes)
    speed = fit.speed if fit.kind == "chat" else ""
    sees = {True: "yes", False: "", None: "?"}[fit.sees]
    return (fit.name, fit.kind, weights, context, kv, kept, total, speed, sees, fit.verified)
