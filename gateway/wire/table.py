"""Which request fields each endpoint honours, takes without effect, or refuses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gateway.wire import chat, completions, embeddings, responses
from gateway.wire.reading import Fields, Request


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint's request: its shape, what it knows beyond that, and what it asks models for."""

    path: str
    shape: type[Request]
    fields: Fields
    kind: Literal["chat", "embedding"] = "chat"

    @property
    def honoured(self) -> list[str]:
        """List the fields that are served."""
        fields = self.shape.model_fields
        names = [info.alias or name for name, info in fields.items()]
        return [name for name in names if name not in self.fields.harmless]

    @property
    def harmless(self) -> list[str]:
        """List the fields that are accepted and change nothing."""
        return sorted(self.fields.harmless)

    @property
    def refused(self) -> Mapping[str, str]:
        """Give the fields that are answered with 400, each with what is said of it."""
        return self.fields.refused


ENDPOINTS = (
    Endpoint("/v1/embeddings", embeddings.EmbeddingsRequest, embeddings.FIELDS, "embedding"),
    Endpoint("/v1/chat/completions", chat.ChatRequest, chat.FIELDS),
    Endpoint("/v1/completions", completions.CompletionRequest, completions.FIELDS),
    Endpoint("/v1/responses", responses.ResponsesRequest, responses.FIELDS),
)


def fields_table() -> str:
    """Return the table of docs/api.md."""
    rows = ["| Endpoint | Honoured | Accepted, without effect | Refused with 400 |"]
    rows.append("| --- | --- | --- | --- |")
    for endpoint in ENDPOINTS:
        columns = (endpoint.honoured, endpoint.harmless, list(endpoint.refused))
        listed = [" ".join(f"`{name}`" for name in names) for names in columns]
        rows.append(f"| `POST {endpoint.path}` | {' | '.join(listed)} |")
    return "\n".join(rows)
