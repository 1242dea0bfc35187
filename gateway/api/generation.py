"""Shared by the endpoints that generate text: usage, sampling, headers about schemas."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gateway.api.requests import first_names, named_header
from gateway.errors import SchemaViolated
from gateway.jobs import Delta, GenerateJob, Sampling, Usage
from gateway.registry import ChatSpec, Resolved
from gateway.serving.generation.answer_checks import AnswerChecker, Fit
from gateway.serving.generation.batcher import Generation
from gateway.wire.generation import SchemaVerdict


def verdict_json(checker: AnswerChecker, fit: Fit | None) -> SchemaVerdict | None:
    """Return a choice's verdict as its answer has it; None if it says no more than a success."""
    if fit is None or (fit is Fit.VALID and not checker.unenforced):
        return None
    return {"unenforced": list(first_names(checker.unenforced)), "schema_valid": fit.is_valid}


async def last_verdict(checker: AnswerChecker, index: int) -> SchemaVerdict | None:
    """Return a choice's verdict for its last event. Raises SchemaViolated if it is broken."""
    fit = await checker.check(index)
    require_fit(fit)
    return verdict_json(checker, fit)


def require_fit(*fits: Fit | None) -> None:
    """Raise SchemaViolated if one of these choices is broken."""
    if Fit.BROKEN in fits:
        raise SchemaViolated


def is_violated(fit: Fit | None) -> bool:
    """Return True if a choice is known to violate a schema."""
    return fit is not None and fit.is_valid is False


def can_retry(job: GenerateJob) -> bool:
    """Return True if another try could give another answer."""
    return job.sampling.seed is None and job.sampling.temperature > 0


def add_usage(usage: Usage, more: Usage) -> Usage:
    """Add the usage of another try, with its prompt."""
    return Usage(
        prompt_tokens=usage.prompt_tokens + more.prompt_tokens,
        completion_tokens=usage.completion_tokens + more.completion_tokens,
        cached_tokens=usage.cached_tokens + more.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens + more.reasoning_tokens,
        kept_tokens=usage.kept_tokens + more.kept_tokens,
    )


def count_delta(usage: Usage, delta: Delta) -> Usage:
    """Add a delta's tokens."""
    return replace(
        usage,
        completion_tokens=usage.completion_tokens + delta.tokens,
        reasoning_tokens=usage.reasoning_tokens + delta.reasoning_tokens,
        cached_tokens=usage.cached_tokens + delta.cached_tokens,
        kept_tokens=usage.kept_tokens + delta.kept_tokens,
    )


def default_sampling(spec: ChatSpec) -> Sampling:
    """Return the sampling of models.yaml; values that it lacks are OpenAI's, marked as unset."""
    values = spec.sampling.model_dump(exclude={"max_tokens"})
    unset = frozenset(name for name, value in values.items() if value is None)
    return Sampling(**{name: values[name] for name in values.keys() - unset}, unset=unset)


def template_args(resolved: Resolved, spec: ChatSpec) -> dict[str, Any]:
    """Return the template's arguments: thinking by alias, else by model, else its own default."""
    alias_thinking = resolved.alias.thinking if resolved.alias else None
    thinking = spec.thinking if alias_thinking is None else alias_thinking
    args: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    return {**args, **spec.chat_template_kwargs}


def answer_headers(generation: Generation) -> dict[str, str]:
    """Return the headers of an answer.

    One for calls that stay text, as the model's format of them is unknown; one with JSON pointers
    to the parts of its schema, up to a number of them, that no grammar enforces.
    """
    headers = {"x-gateway-tool-format": "unknown"} if generation.calls_are_text else {}
    return headers | named_header("x-gateway-unenforced", generation.checker.unenforced)


def schema_valid_header(unenforced: Sequence[str], fits: Sequence[Fit | None]) -> dict[str, str]:
    """Return the header for whether answers fit; none if it says no more than a success."""
    verdicts = [fit.is_valid for fit in fits if fit is not None]
    verdict = False if False in verdicts else None if None in verdicts else True
    if not verdicts or (verdict and not unenforced):
        return {}
    return {"x-gateway-schema-valid": {True: "true", False: "false", None: "unknown"}[verdict]}
