"""Anthropic's form of the list of models: a page of them, and one."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

from typing_extensions import TypedDict

from gateway.errors import BadRequest

MOST_LISTED = 1000


class AnthropicModel(TypedDict):
    """A model by one of its names."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None
    max_tokens: int | None
    capabilities: None
    line: None
    lifecycle: Literal["active"]
    deprecated_at: None
    retires_at: None


class AnthropicModels(TypedDict):
    """A page of the list; `has_more` are there in the direction that was asked for."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_info(name: str, created: int, max_context: int | None) -> AnthropicModel:
    """Return a model; its context, if it is known, bounds what it reads and writes."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": max_context,
        "max_tokens": max_context,
        "capabilities": None,
        "line": None,
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
    }


def page(models: Sequence[AnthropicModel], query: Mapping[str, str]) -> AnthropicModels:
    """Return one page: `limit` models (20 by default), after `after_id` or before `before_id`.

    Raises BadRequest for another limit than 1 to 1000, an id that is not listed, and both ids.
    """
    text = query.get("limit", "20")
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:5]) <= MOST_LISTED):
        raise BadRequest(f"Invalid 'limit': it should be 1 to {MOST_LISTED}.", param="limit")
    if "after_id" in query and "before_id" in query:
        raise BadRequest("Send 'after_id' or 'before_id', not both.", param="before_id")
    limit, total = int(text), len(models)
    if "before_id" in query:
        end = _place(models, query, "before_id")
        start = max(0, end - limit)
        has_more = start > 0
    else:
        start = _place(models, query, "after_id") + 1 if "after_id" in query else 0
        end = min(start + limit, total)
        has_more = end < total
    shown = list(models[start:end])
    return {
        "data": shown,
        "has_more": has_more,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }


def _place(models: Sequence[AnthropicModel], query: Mapping[str, str], name: str) -> int:
    ids = [model["id"] for model in models]
    if query[name] not in ids:
        raise BadRequest(f"Invalid '{name}': there is no such model.", param=name)
    return ids.index(query[name])
