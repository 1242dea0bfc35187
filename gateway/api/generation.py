"""What chat completions, completions and responses share between reading and answering."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gateway.api.requests import MOST_NAMED, named_header
from gateway.jobs import Delta, GenerateJob, Sampling, Usage
from gateway.registry import ChatSpec, Resolved
from gateway.serving.generation.batcher import Generation
from gateway.serving.generation.verdicts import Verdicts
from gateway.wire.generation import SchemaVerdict


async def verdict_json(verdicts: Verdicts, index: int) -> SchemaVerdict | None:
    """Return what a stream says at a choice's end of what no grammar held, if there was any."""
    if not verdicts.unenforced:
        return None
    pointers = list(verdicts.unenforced[:MOST_NAMED])
    return {"unenforced": pointers, "schema_valid": await verdicts.of(index)}


def may_write_again(job: GenerateJob) -> bool:
    """Tell whether another try could come out differently."""
    return job.sampling.seed is None and job.sampling.temperature > 0


def added(usage: Usage, more: Usage) -> Usage:
    """Add what another try cost, its prompt too."""
    return Usage(
        prompt_tokens=usage.prompt_tokens + more.prompt_tokens,
        completion_tokens=usage.completion_tokens + more.completion_tokens,
        cached_tokens=usage.cached_tokens + more.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens + more.reasoning_tokens,
    )


def counted(usage: Usage, delta: Delta) -> Usage:
    """Add what a delta cost."""
    return replace(
        usage,
        completion_tokens=usage.completion_tokens + delta.tokens,
        reasoning_tokens=usage.reasoning_tokens + delta.reasoning_tokens,
        cached_tokens=usage.cached_tokens + delta.cached_tokens,
    )


def defaults(spec: ChatSpec) -> Sampling:
    """Return the sampling that models.yaml sets, and OpenAI's defaults marked as unset."""
    given = spec.sampling.model_dump(exclude={"max_tokens"})
    unset = frozenset(name for name, value in given.items() if value is None)
    return Sampling(**{name: given[name] for name in given.keys() - unset}, unset=unset)


def template_args(resolved: Resolved, spec: ChatSpec) -> dict[str, Any]:
    """Return the template's arguments: thinking by alias, else by model, else its own default."""
    asked = resolved.alias.thinking if resolved.alias else None
    thinking = spec.thinking if asked is None else asked
    args: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    return {**args, **spec.chat_template_kwargs}


def unread(generation: Generation) -> dict[str, str]:
    """Say in a header that calls come as text, since the model's form of them is not known."""
    return {"x-gateway-tool-format": "unknown"} if generation.calls_are_text else {}


def unenforced(generation: Generation) -> dict[str, str]:
    """Name in a header what of the schema no grammar holds: some of it, by JSON pointer."""
    return named_header("x-gateway-unenforced", generation.verdicts.unenforced)


def judged(verdicts: Sequence[bool | None]) -> dict[str, str]:
    """Say in a header whether answers fit a schema that their grammar held in part."""
    verdict = False if False in verdicts else None if None in verdicts else True
    return {"x-gateway-schema-valid": {True: "true", False: "false", None: "unknown"}[verdict]}
