"""The calls that rank 0 has the other ranks make, as bytes, and their results, as digests.

The bytes are JSON of the dataclasses below: unlike a pickle they cannot run code.
"""

import zlib
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from gateway.jobs.steps import StepPlan, StepResult, Verdict


@dataclass(frozen=True, slots=True)
class Setup:
    """Rank 0's facts about a model that the others are to load."""

    spec: str  # a digest of the model's keys in models.yaml
    files: str  # a digest of the model's files, and of all files loaded with them
    prefix_cache_bytes: int
    speculate_rows: int


@dataclass(frozen=True, slots=True)
class LoadCall:
    """Load this rank's share of a model."""

    # The reply is the reason if it cannot be loaded, else empty.
    model: str
    setup: Setup
    method: Literal["load"] = "load"


@dataclass(frozen=True, slots=True)
class DropCall:
    """Close a model, if it is loaded. There is no reply."""

    model: str
    method: Literal["drop"] = "drop"


@dataclass(frozen=True, slots=True)
class StepCall:
    """Make a step."""

    # The reply is the digest of its result.
    model: str
    plan: StepPlan
    method: Literal["step"] = "step"


@dataclass(frozen=True, slots=True)
class ProbeCall:
    """Ask whether the device still works."""

    model: str
    method: Literal["probe"] = "probe"


@dataclass(frozen=True, slots=True)
class SelfTestCall:
    """Continue the self-test, or begin it anew."""

    model: str
    is_first: bool
    rows: int  # rows of the decode step to time; 0 to compare sequences
    method: Literal["self_test"] = "self_test"


@dataclass(frozen=True, slots=True)
class VerdictCall:
    """Apply the self-test's verdict."""

    model: str
    verdict: Verdict
    method: Literal["apply_verdict"] = "apply_verdict"


@dataclass(frozen=True, slots=True)
class DropAdapterCall:
    """Forget an adapter by its number."""

    model: str
    number: int
    method: Literal["drop_adapter"] = "drop_adapter"


EngineCall: TypeAlias = StepCall | ProbeCall | SelfTestCall | VerdictCall | DropAdapterCall
Call: TypeAlias = LoadCall | DropCall | EngineCall

_CALLS: Final[TypeAdapter[Call]] = TypeAdapter(
    Annotated[Call, Field(discriminator="method")],
    config=ConfigDict(
        arbitrary_types_allowed=True,  # a compiled grammar, which is not sent
        extra="forbid",
        ser_json_bytes="base64",
        val_json_bytes="base64",
        ser_json_inf_nan="constants",
    ),
)


def encode(call: Call) -> bytes:
    return _CALLS.dump_json(call)


def decode(data: bytes) -> Call:
    """Raises ValueError for bytes that are no call."""
    try:
        return _CALLS.validate_json(data)
    except ValidationError as error:
        raise ValueError(f"not a call: {error}") from error


def digest(result: StepResult) -> str:
    """Return a digest of a step's result. Ranks whose digests differ are no longer alike."""
    # A call's id is random and a logprob may be rounded differently, so neither counts.
    said = [
        (delta.id, delta.tokens, delta.finish_reason, delta.text, delta.reasoning, delta.error)
        for delta in result.deltas
    ]
    state = (result.size, sorted(result.reading), result.decoding, len(result.faults))
    return f"{zlib.crc32(repr((said, state)).encode()):08x}"
