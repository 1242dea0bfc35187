"""What every test may ask for."""

import pytest

import gateway.engine  # noqa: F401  (first: OpenBLAS must be there before mlx)


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio, as the gateway does."""
    return "asyncio"
