"""Sets of paths, from the table of all endpoints."""

from collections.abc import Iterable

from gateway.api.endpoints import ENDPOINTS
from gateway.api.openapi import Endpoint


def _paths(endpoints: Iterable[Endpoint]) -> frozenset[str]:
    return frozenset(path.removeprefix("/v1") for endpoint in endpoints for path in endpoint.paths)


# The first path segments (after /v1) of OpenAI's endpoints that are not served.
UNSERVED = frozenset(
    [
        *("assistants", "audio", "batches", "chatkit", "containers", "conversations", "edits"),
        *("engines", "evals", "files", "fine-tunes", "fine_tuning", "images", "moderations"),
        *("organization", "realtime", "skills", "threads", "uploads", "vector_stores", "videos"),
    ]
)
PATHS = _paths(endpoint for endpoint in ENDPOINTS if not endpoint.is_admin)
OPERATIONS = {
    path: endpoint.operation
    for endpoint in ENDPOINTS
    for path in endpoint.paths
    if endpoint.operation
}
UNTRACED_PATHS = frozenset(
    path for endpoint in ENDPOINTS if not endpoint.is_traced for path in endpoint.paths
)
OPEN_PATHS = _paths(endpoint for endpoint in ENDPOINTS if endpoint.is_open and not endpoint.is_page)
METERED_PATHS = _paths(endpoint for endpoint in ENDPOINTS if endpoint.is_metered)
