"""Graphiti whole: episodes into a graph, and searches over it."""

from datetime import UTC, datetime
from typing import Any

import pytest
from graphiti_core import Graphiti
from graphiti_core.nodes import EpisodeType
from graphiti_core.search.search_config_recipes import COMBINED_HYBRID_SEARCH_CROSS_ENCODER
from graphiti_core.utils.bulk_utils import RawEpisode

from compat_tests.graphiti.conftest import Clients

pytestmark = pytest.mark.anyio
TODAY = datetime(2026, 5, 4, 9, 30, tzinfo=UTC)
NOTES = ["Alice works at Acme in Paris.", "Bob moved from Rome to Paris, where he met Alice."]


def graph(clients: Clients, driver: Any, kind: str) -> Any:
    """Build Graphiti as its users do."""
    return Graphiti(
        graph_driver=driver,
        llm_client=clients.llm(kind),
        embedder=clients.embedder(),
        cross_encoder=clients.reranker(),
    )


async def add(graphiti: Any, number: int) -> Any:
    """Tell it one of the notes."""
    return await graphiti.add_episode(
        name=f"note {number}",
        episode_body=NOTES[number],
        source_description="a note",
        source=EpisodeType.text,
        reference_time=TODAY,
    )


async def test_one_short_episode_is_taken_in_and_found(clients: Clients, driver: Any) -> None:
    """The LLM, the embedder and the reranker are all served here."""
    graphiti = graph(clients, driver, "json_schema")
    added = await add(graphiti, 0)
    assert added.episode.content == NOTES[0]
    assert "ExtractedEntities" in clients.check_replies()
    assert all(len(node.name_embedding) == 384 for node in added.nodes)
    assert all(len(edge.fact_embedding) == 384 for edge in added.edges)

    found = await graphiti.search_("Alice in Paris", COMBINED_HYBRID_SEARCH_CROSS_ENCODER)
    assert [episode.content for episode in found.episodes] == [NOTES[0]]
    assert all(0 <= score <= 1 for score in found.episode_reranker_scores)


@pytest.mark.compat
@pytest.mark.parametrize("kind", ["json_schema", "json_object", "responses"])
async def test_a_graph_grows_and_is_searched(clients: Clients, driver: Any, kind: str) -> None:
    """Two episodes, two more in bulk, every search, and communities."""
    graphiti = graph(clients, driver, kind)
    for number in range(2):
        added = await add(graphiti, number)
        assert added.episode.content == NOTES[number]
    bulk = await graphiti.add_episode_bulk(
        [
            RawEpisode(
                name=f"bulk {number}",
                content=content,
                source=EpisodeType.message,
                source_description="a chat",
                reference_time=TODAY,
            )
            for number, content in enumerate(
                ["Carol: I have left Acme.", "Dave: Then come to us, to Globex in Madrid."]
            )
        ]
    )
    assert len(bulk.episodes) == 2

    await graphiti.search("Where does Alice work?")
    found = await graphiti.search_("Alice in Paris", COMBINED_HYBRID_SEARCH_CROSS_ENCODER)
    assert len(found.episodes) == len(found.episode_reranker_scores) >= 2
    assert len(found.nodes) == len(found.node_reranker_scores)
    assert len(found.edges) == len(found.edge_reranker_scores)

    communities, members = await graphiti.build_communities()
    assert bool(communities) == bool(members)
    seen = clients.check_replies()
    assert {"ExtractedEntities", "ExtractedEdges", "CombinedExtraction"} <= seen
