"""`mlx-gateway models recommend`: the catalogue's models that fit a machine, best ones first.

Memory must have room for the weights, one sequence's KV and the smallest prefix cache. The sequence
is as long as the memory allows, up to the model's context. The first model of a kind is the one to
take: the largest with room for a long context that is fast enough.
"""

import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from gateway.cli import lazy
from gateway.cli.terminal import show
from gateway.logs import human_bytes
from gateway.registry import Facts, LayersKept, read_facts, read_short_names
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
# Bytes per second that memory gives: divided by the bytes of weights that a token reads, they are
# the most tokens per second. Those of M2, M1 Pro, M1 Max and an Ultra, which is two of these:
# https://github.com/ggml-org/llama.cpp/pull/1642.
BANDWIDTHS: Final = (102e9, 205e9, 410e9, 819e9)
# The most bytes that Macs with each of the chips but the last offer: of 32, 64 and 128 GiB. For M4:
# https://huggingface.co/hardware/apple-m4, .../apple-m4-max.
OFFERED: Final = (SMALL_MAC * 2 // 3, 48 * GIB, 96 * GIB)
CORE: Final = 8e9  # two cores read 16.4 GB/s: benchmarks/measurements.md
WIDENED: Final = 7  # bytes in float32, which weights become on a CPU, of a byte in 4 bits
FAST: Final = 15  # tokens per second at most, some ten in practice: faster than most people read
ROOMS: Final = (32_768, 8192)  # tokens; contexts of agents, and of conversations
PARTS: Final = 16  # An embedding model should take one of these parts of the memory at most.
BRIEF: Final = ("Take", "Model", "Kind", "Context", "In all", "Tokens/s", "Images")
DETAIL: Final = ("Weights", "KV", "Kept prompts", "Verified")


class Machine(NamedTuple):
    """The bytes that a machine offers to models, and the bytes per second that it reads."""

    memory_bytes: int
    bandwidth: float
    is_cpu: bool = False


def machine_with(memory_bytes: int, cores: int = 0) -> Machine:
    """Return a CPU with these cores or, without any, the slowest Mac that offers this memory."""
    if cores:
        return Machine(memory_bytes, cores * CORE, is_cpu=True)
    return Machine(memory_bytes, BANDWIDTHS[bisect_left(OFFERED, memory_bytes)])


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
    is_coder: bool = False
    widened: int = 1  # bytes in float32 of a byte of the weights

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.prefix_bytes

    def speed(self, machine: Machine) -> float:
        """Return the most tokens per second that one sequence gets."""
        return machine.bandwidth / (self.token_bytes * (self.widened if machine.is_cpu else 1))


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
        *(name, kind, weights, context, is_whole, kv_bytes, prefix_bytes, token_bytes),
        *(verified, sees, facts.is_coder),
    )


def fits(memory_bytes: int, settings: Settings) -> Iterator[Fit]:
    sources = {name: str(entry["source"]) for name, entry in read_short_names().items()}
    known = filter(None, (fit(*model, memory_bytes, settings) for model in read_facts()))
    for each in sorted(known, key=lambda fit: (fit.kind, -fit.weights_bytes)):
        # The name of a quantized repository says so.
        yield replace(each, widened=WIDENED if re.search(r"\dbit|FP4", sources[each.name]) else 1)


def order(fits: Iterable[Fit], machine: Machine) -> list[Fit]:
    """Sort models that fit by kind, the one to take first.

    Of chat models that is the one with room for a long context, or else a shorter one, that is fast
    enough and no coder: the largest of these, or else the fastest. Of others it is the largest that
    is fast enough and takes little memory from a chat model, or else the fastest.
    """

    def place(fit: Fit) -> tuple[str, int, bool, float]:
        is_chat, speed, context = fit.kind == "chat", fit.speed(machine), fit.context or 0
        room = sum(context < tokens for tokens in ROOMS) if is_chat else 0
        is_general = not fit.is_coder and (
            is_chat or fit.weights_bytes * PARTS <= machine.memory_bytes
        )
        is_good = speed >= FAST and is_general
        return fit.kind, room, not is_good, -fit.weights_bytes * fit.widened if is_good else -speed

    return sorted((fit for fit in fits if fit.context is not None), key=place)


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
    everything: Annotated[
        bool, typer.Option("--all", help="Show all columns, and the models of unknown size.")
    ] = False,
) -> None:
    """Say which models of the catalogue to take, and list all that fit, best ones first.

    A model fits with its weights, the KV of one sequence and kept prompts. Its tokens per second
    are at most the machine's memory bandwidth by the bytes of weights that a token reads.
    """
    settings = load_settings({})
    if memory is None:
        device = lazy.device.choose_device(settings.device)
        cores = lazy.device.cpu_threads() if device == "cpu" else 0
        machine = machine_with(lazy.device.memory_bytes(device), cores)
    else:
        machine = machine_with(working_set(_read_memory(memory)))
        settings = settings.model_copy(update={"cache_max_bytes": None})  # this machine's limit
    found = order(fits(machine.memory_bytes, settings), machine)
    budget = human_bytes(lazy.limits.budget_bytes(settings, machine.memory_bytes))
    picks = {fit.kind: fit.name for fit in reversed(found) if fit.kind != "rerank"}
    for kind in ("chat", "embedding"):
        pick = picks.get(kind, "org/name  # none of the catalogue fits: a smaller one of the hub")
        print(f"For {kind}: mlx-gateway serve {pick}", file=sys.stderr)
    columns = BRIEF + DETAIL * everything
    rows = [("take" * (fit.name in picks.values()), *_row(fit, machine)) for fit in found]
    show(columns, [row[: len(columns)] for row in rows])
    has_room = any(fit.kind == "chat" and (fit.context or 0) >= ROOMS[0] for fit in found)
    lack = "" if has_room else f"; no chat model has room for {ROOMS[0]:,} tokens"
    print(f"note: models may take {budget}{lack}", file=sys.stderr)
    if everything:
        for key, note in (("size", "sizes unknown:"), ("revision", "the hub's newest is used for")):
            names = [name for name, _, facts in read_facts() if key in facts.unread]
            print(f"note: {note} {', '.join(names)}", file=sys.stderr)


def _row(fit: Fit, machine: Machine) -> tuple[str, ...]:
    sizes = (fit.weights_bytes, fit.kv_bytes, fit.prefix_bytes, fit.total_bytes)
    context = f"{fit.context:,}{'' if fit.is_whole else ' (cut)'}" if fit.context else ""
    weights, kv, kept, total = (human_bytes(size) if size else "" for size in sizes)
    speed = f"{fit.speed(machine):.1f}" if fit.kind == "chat" else ""
    sees = {True: "yes", False: "", None: "?"}[fit.sees]
    return (fit.name, fit.kind, context, total, speed, sees, weights, kv, kept, fit.verified)
