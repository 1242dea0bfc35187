"""Each of Graphiti's clients alone: the calls it makes, and its reading of the answers."""

import asyncio
from typing import Any, Literal

import numpy as np
import pytest
from graphiti_core.prompts import (
    dedupe_edges,
    dedupe_nodes,
    extract_edges,
    extract_nodes,
    extract_nodes_and_edges,
    summarize_nodes,
    summarize_sagas,
)
from graphiti_core.prompts.models import Message
from pydantic import BaseModel, Field

from compat_tests.graphiti.conftest import Clients

pytestmark = pytest.mark.anyio


class Person(BaseModel):
    """An entity type as users write them."""

    status: Literal["active", "retired"] | None = None
    age: int | None = Field(None, ge=0, le=120)
    email: str | None = Field(None, pattern=r"^[a-z]{1,8}@[a-z]{1,8}\.org$")
    friends: list[str] = Field(max_length=2)


MODELS: list[Any] = [
    extract_nodes.ExtractedEntities,
    extract_nodes.SummarizedEntities,
    dedupe_nodes.NodeResolutions,
    extract_edges.ExtractedEdges,
    extract_edges.EdgeTimestamps,
    extract_edges.BatchEdgeTimestamps,
    dedupe_edges.EdgeDuplicate,
    extract_nodes_and_edges.CombinedExtraction,
    summarize_nodes.Summary,
    summarize_nodes.SummaryDescription,
    summarize_sagas.SagaSummary,
    Person,
]


def messages() -> list[Any]:
    """Give a prompt afresh: the clients write into it."""
    return [
        Message(role="system", content="You read notes and answer in JSON."),
        Message(role="user", content="Alice works at Acme in Paris. Bob is her friend."),
    ]


@pytest.mark.parametrize("kind", ["json_schema", "json_object", "responses"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
async def test_a_reply_fits_the_model_it_was_asked_for(
    clients: Clients, kind: str, model: type[BaseModel]
) -> None:
    """A schema without `strict` over chat completions, and with it over responses.

    In json_object mode it stands in the prompt: models.yaml says that demo-chat is held to it.
    """
    await clients.llm(kind).generate_response(messages(), model)
    assert clients.check_replies() == {model.__name__}


async def test_without_a_schema_a_reply_is_an_object(clients: Clients) -> None:
    for kind in ("json_object", "responses"):
        await clients.llm(kind).generate_response(messages())
    assert all(isinstance(reply, dict) for _, reply in clients.replies)


async def test_attributes_fit_a_type_of_the_user(clients: Clients) -> None:
    reply = await clients.llm("json_schema").generate_response(
        messages(), Person, attribute_extraction=True
    )
    assert reply.keys() == Person.model_fields.keys()
    clients.check_replies()


async def test_twenty_single_embeddings_at_once_equal_one_batch(clients: Clients) -> None:
    """Graphiti asks for twenty embeddings at once."""
    embedder = clients.embedder()
    names = [f"Entity number {n}" for n in range(20)]
    singles = await asyncio.gather(*(embedder.create([name]) for name in names))
    together = await embedder.create_batch(names)
    assert np.shape(singles) == (20, 384)
    assert np.allclose(singles, together, atol=1e-5)


async def test_eighty_rerankings_at_once_all_score(clients: Clients) -> None:
    """A search with the cross-encoder asks for four scopes, twenty passages at a time."""
    reranker = clients.reranker()
    passages = [f"Fact {n}: Alice met Bob {'again ' * (n % 7)}in Paris." for n in range(20)]
    ranked = await asyncio.gather(
        *(reranker.rank(f"Who met Bob? ({scope})", passages) for scope in range(4))
    )
    for scores in ranked:
        assert sorted(passage for passage, _ in scores) == sorted(passages)
        assert all(0 <= score <= 1 for _, score in scores)


async def test_ranking_nothing_asks_nothing(clients: Clients) -> None:
    assert await clients.reranker().rank("anything", []) == []
