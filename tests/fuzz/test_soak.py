"""The same by the twenty thousand, to the real engine."""

from collections.abc import Iterator

import pytest
from schemathesis import GenerationMode

from gateway.app.engines import MlxEngines
from gateway.registry import Catalog, load_catalog
from tests.fuzz.asking import POSTS, Ask, asking
from tests.fuzz.harness import send_bodies, send_documented, send_odd_values
from tests.processes import DEMO
from tests.serving_app import settings

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def models() -> Catalog:
    """Give the models by the names that the fuzz knows."""
    return load_catalog(
        DEMO, {"GATEWAY_ALL_MINILM_L6_V2_ALIASES": "embed", "GATEWAY_DEMO_CHAT_ALIASES": "writer"}
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
    send_documented(ask, models, path, mode, 2000, is_repeated=False)


@pytest.mark.parametrize("path", POSTS)
def test_whatever_is_sent_is_answered(ask: Ask, path: str) -> None:
    send_bodies(ask, path, 1000, is_repeated=False)


@pytest.mark.parametrize("path", POSTS)
def test_every_odd_value_of_every_field_is_answered(ask: Ask, path: str) -> None:
    """One after the other, in the same gateway."""
    send_odd_values(ask, path)
