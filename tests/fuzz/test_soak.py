"""The same by the twenty thousand, to the real engine."""

from collections.abc import Iterator

import pytest
from schemathesis import GenerationMode

from gateway.app.engines import MlxEngines
from gateway.registry import Catalog, load_catalog
from tests.fuzz import test_bodies, test_documented
from tests.fuzz.asking import POSTS, Ask, asking
from tests.processes import DEMO
from tests.serving_app import settings

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def models() -> Catalog:
    """Give the models by the names that the fuzz knows."""
    return load_catalog(
        DEMO,
        {"GATEWAY_ALL_MINILM_L6_V2_ALIASES": "embed", "GATEWAY_DEMO_CHAT_ALIASES": "writer"},
    )


@pytest.fixture(scope="module")
def ask(models: Catalog) -> Iterator[Ask]:
    """Serve them, for all of these tests."""
    with asking(models, MlxEngines(settings()), request_timeout_s=20) as ask:
        yield ask


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", POSTS)
def test_whatever_the_document_says_is_answered(
    ask: Ask, models: Catalog, path: str, mode: GenerationMode
) -> None:
    """Two thousand of each kind, to each endpoint."""
    test_documented.fuzzed(ask, models, path, mode, test_documented.LONG)


@pytest.mark.parametrize("path", POSTS)
def test_whatever_is_sent_is_answered(ask: Ask, path: str) -> None:
    """A thousand to each endpoint."""
    test_bodies.fuzzed(ask, path, test_bodies.LONG)


@pytest.mark.parametrize("path", POSTS)
def test_every_odd_value_of_every_field_is_answered(ask: Ask, path: str) -> None:
    """One after the other, in the same gateway."""
    test_bodies.exhausted(ask, path)
