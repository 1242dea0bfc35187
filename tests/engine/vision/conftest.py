"""One sandbox for a module's pictures."""

from collections.abc import Iterator

import pytest

from gateway.serving.sandbox import Sandbox
from tests.sandboxes import sandbox


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    """Give a sandbox with more time than a gateway's: other tests make a processor slow."""
    with sandbox("image", 20) as images:
        yield images
