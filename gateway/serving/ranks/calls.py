"""The calls that rank 0 sends to other ranks, as JSON, and digests of their results.

Unlike a pickle, JSON cannot run code.
"""

import zlib
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from gateway.jobs.steps import StepPlan, StepResult, Verdict


@dataclass(frozen=True, slots=True)
class Setup:
    """The facts that the other ranks need to load their shares of a model."""

    spec: str  # a digest of the model's keys in models.yaml
    files: str  # the model's self-test digest, which must be equal on every rank
    prefix_cache_bytes: int
    speculate_rows: int


@dataclass(frozen=True, slots=True)
class LoadCall:
    """Load this rank's share of a model; the reply is empty or the reason of a failure."""

    model: str
    setup: Setup
    method: Literal["load"] = "load"


@dataclass(frozen=True, slots=True)
class DropCall:
    """Close a model, without a reply."""

    model: str
    method: Literal["drop"] = "drop"


@dataclass(frozen=True, slots=True)
class StepCall:
    """Run a step of the engine; the reply is a digest of the result."""

    model: str
    plan: StepPlan
    method: Literal["step"] = "step"


@dataclass(frozen=True, slots=True)
class ProbeCall:
    """Probe the device."""

    model: str
    method: Literal["probe"] = "probe"


@dataclass(frozen=True, slots=True)
class SelfTestCall:
    """Run the next step of the self-test, or the first step if `is_first`."""

    model: str
    is_first: bool
    rows: int  # rows of the decode step to time; 0 for the comparison of sequences
    method: Literal["self_test"] = "self_test"


@dataclass(frozen=True, slots=True)
class VerdictCall:
    """Apply the self-test's verdict."""

    model: str
    verdict: Verdict
    method: Literal["apply_verdict"] = "apply_verdict"


@dataclass(frozen=True, slots=True)
class DropAdapterCall:
    """Free an adapter."""

    model: str
    number: int
    method: Literal["drop_adapter"] = "drop_adapter"


EngineCall: TypeAlias = StepCall | ProbeCall | SelfTestCall | VerdictCall | DropAdapterCall
Call: TypeAlias = LoadCall | DropCall | EngineCall

_CALLS: Final[TypeAdapter[Call]] = TypeAdapter(
    Annotated[Call, Field(discriminator="method")],
    config=ConfigDict(
        arbitrary_types_allowed=True,  # for the compiled grammar, which is always None
        extra="forbid",
        ser_json_bytes="base64",
        val_json_bytes="base64",
        ser_json_inf_nan="constants",
    ),
)


def encode(call: Call) -> bytes:
    return _CALLS.dump_json(call)


def decode(data: bytes) -> Call:
    """Return the call in these bytes. Raises ValueError."""
    try:
        return _CALLS.validate_json(data)
    except ValidationError as error:
        raise ValueError(f"not a call: {error}") from error


def digest(result: StepResult) -> str:
    # Ids of tool calls are random, and ranks may round logprobs differently: neither counts.
    said = [
        (delta.id, delta.tokens, delta.finish_reason, delta.text, delta.reasoning, delta.error)
        for delta in result.deltas
    ]
    state = (result.size, sorted(result.reading), result.decoding, len(result.faults))
    return f"{zlib.crc32(repr((said, state)).encode()):08x}"
