"""Anthropic's form of the list of models: a page of them, and one."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

from typing_extensions import TypedDict

from gateway.errors import BadRequest
from gateway.wire.validation import find_place, read_limit

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
    limit, total = read_limit(query, MOST_LISTED), len(models)
    if "after_id" in query and "before_id" in query:
        raise BadRequest("Send 'after_id' or 'before_id', not both.", param="before_id")
    ids = [model["id"] for model in models]
    if "before_id" in query:
        end = find_place(ids, query, "before_id", "model")
        start = max(0, end - limit)
        has_more = start > 0
    else:
        start = 0
        if "after_id" in query:
            start = find_place(ids, query, "after_id", "model") + 1
        end = min(start + limit, total)
        has_more = end < total
    shown = list(models[start:end])
    return {
        "data": shown,
        "has_more": has_more,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }
