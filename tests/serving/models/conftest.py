"""The model cache's tests run in virtual time: none is slow, nor fails on a busy machine."""

from typing import Any

import pytest

from gateway import clock
from tests.virtual_time import VirtualLoop


@pytest.fixture
def anyio_backend(monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
    """Run each test in a loop of its own, whose time the cache reads."""
    loop = VirtualLoop()
    monkeypatch.setattr(clock, "now", loop.time)
    return "asyncio", {"loop_factory": lambda: loop}
