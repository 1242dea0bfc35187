"""By default nothing tells one API key the prompts of another."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.checkpoints import write_chat
from tests.cpu_engines import cpu_engines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio

SECRET = "The password of the vault is correct horse battery staple, and nobody may know. " * 12
ONE, OTHER = ({"authorization": f"Bearer {key}"} for key in ("one", "other"))


QUESTION = {"type": "predicate", "instructions": "Is it?"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": SECRET, "max_tokens": 1},
    "/v1/decisions": {"input": SECRET, "questions": [QUESTION]},
}


async def ask(client: httpx2.AsyncClient, path: str, key: Mapping[str, str]) -> int:
    """Return the number of the prompt's tokens that were cached."""
    body = {"model": "m", **BODIES[path]}
    usage = (await client.post(path, json=body, headers=key)).json()["usage"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    cached: int = details["cached_tokens"]
    return cached


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("shared", [False, True])
async def test_another_keys_prompt_is_not_at_hand_unless_they_share(
    tmp_path: Path, shared: bool, path: str
) -> None:
    write_chat(tmp_path / "m")
    given = catalog(tmp_path, {"m": {"kind": "chat", "source": "path:m"}})
    settings: dict[str, Any] = {"api_keys": ["one", "other"], "shared_prefixes": shared}
    async with served(given, cpu_engines(prefix_cache_bytes=1 << 26), **settings) as client:
        assert await ask(client, path, ONE) == 0
        assert bool(await ask(client, path, OTHER)) is shared
        assert await ask(client, path, ONE) > 0
        assert await ask(client, path, OTHER) > 0  # what it asked itself
