"""What every test may ask for."""

import gateway.engine  # noqa: F401  (first: OpenBLAS must be there before mlx)
import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio, as the gateway does."""
    return "asyncio"
