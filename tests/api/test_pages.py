"""No page of another site can spend the machine of a gateway that asks for no key."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from httpx2 import AsyncClient

from gateway.api.access import PAGES
from gateway.api.endpoints import ENDPOINTS
from gateway.api.openapi import PATH_PARAMETER, Endpoint
from gateway.api.paths import OPEN_PATHS
from gateway.registry import ModelSpec
from gateway.serving.models.named import Candidate
from tests.api.conftest import some_models
from tests.api.harness import code_of
from tests.fakes import ScriptedEngines
from tests.serving_app import served

pytestmark = pytest.mark.anyio
OURS = "https://ours.example"
KEY = {"authorization": "Bearer k"}
STEPS = {"name": "writer", "file": "dashboard.js", "number": "1"}
# What a browser sends of what a page may do: mode and destination. All but reads name an origin,
# and of the reads `fetch` alone does.
READS = {
    "img": ("no-cors", "image"),
    "script": ("no-cors", "script"),
    "iframe": ("navigate", "iframe"),
    "link": ("navigate", "document"),
    "fetch without CORS": ("no-cors", "empty"),
    "fetch": ("cors", "empty"),
}
WRITES = {
    "form": ("navigate", "document"),
    "fetch without CORS": ("no-cors", "empty"),
    "fetch": ("cors", "empty"),
}
every_endpoint = pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda each: each.route)


class WatchedEngines(ScriptedEngines):
    """Engines that count the calls to the hub as loads."""

    async def files(self, spec: ModelSpec, *, is_pull: bool = False) -> Path:
        self.loads.append(f"the files of {spec.id}")
        return Path()

    async def offer(self, repo: str, is_pull: bool) -> Candidate:
        self.loads.append(f"the offer of {repo}")
        return await super().offer(repo, is_pull)


@pytest.fixture(scope="module")
def engines() -> ScriptedEngines:
    return WatchedEngines()


@pytest.fixture(scope="module")
async def client(
    tmp_path_factory: pytest.TempPathFactory, engines: ScriptedEngines
) -> AsyncIterator[AsyncClient]:
    models = some_models(tmp_path_factory.mktemp("models"))
    async with served(models, engines, cors_origins=OURS, any_model="org/*") as client:
        yield client


@pytest.fixture(scope="module")
async def keyed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncClient]:
    models = some_models(tmp_path_factory.mktemp("models"))
    async with served(models, ScriptedEngines(), api_keys="k", admin_key="sesame") as client:
        yield client


def asked(method: str, site: str, origin: str) -> dict[str, dict[str, str]]:
    """Give the headers of each way in which a page may ask."""
    requests = {}
    for way, (mode, dest) in (READS if method == "GET" else WRITES).items():
        requests[way] = {"sec-fetch-site": site, "sec-fetch-mode": mode, "sec-fetch-dest": dest}
        if method != "GET" or way == "fetch":
            requests[way]["origin"] = origin
    return requests


async def status(client: AsyncClient, endpoint: Endpoint, headers: dict[str, str]) -> int:
    """Ask, and look at the head of the answer: some have no end."""
    path = PATH_PARAMETER.sub(lambda match: STEPS[match[1]], endpoint.path)
    async with client.stream(endpoint.method, path, headers=headers) as answer:
        if answer.status_code == 403:
            await answer.aread()
            assert code_of(answer) == "forbidden"
        return answer.status_code


@every_endpoint
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_page_of_another_site_gets_no_further_than_a_link_to_a_page_of_ours(
    client: AsyncClient, engines: ScriptedEngines, endpoint: Endpoint, site: str
) -> None:
    """Another port of this machine is the same site, though it may serve a stranger's page."""
    is_open = endpoint.bare_path in OPEN_PATHS
    for way, headers in asked(endpoint.method, site, "https://evil.example").items():
        is_taken = is_open or (way == "link" and endpoint.path in PAGES)
        assert (await status(client, endpoint, headers) != 403) is is_taken, way
    assert engines.loads == []


@every_endpoint
async def test_an_allowed_page_is_one_that_names_its_origin(
    client: AsyncClient, endpoint: Endpoint
) -> None:
    for way, headers in asked(endpoint.method, "cross-site", OURS).items():
        is_taken = "origin" in headers or endpoint.bare_path in OPEN_PATHS
        is_taken |= way == "link" and endpoint.path in PAGES
        assert (await status(client, endpoint, headers) != 403) is is_taken, way


@every_endpoint
@pytest.mark.parametrize("site", ["same-origin", "none"])
async def test_a_page_of_ours_and_what_a_person_types_are_taken(
    client: AsyncClient, endpoint: Endpoint, site: str
) -> None:
    here = f"http://127.0.0.1:{client.base_url.port}"
    for headers in asked(endpoint.method, site, here).values():
        assert await status(client, endpoint, headers) != 403


@every_endpoint
async def test_with_keys_the_key_alone_decides(keyed: AsyncClient, endpoint: Endpoint) -> None:
    for key in ({}, KEY):
        plain = await status(keyed, endpoint, key)
        for headers in asked(endpoint.method, "cross-site", "https://evil.example").values():
            if "samples" not in endpoint.path or not key:  # their places may all be taken
                assert await status(keyed, endpoint, {**headers, **key}) == plain


@pytest.mark.parametrize(
    "endpoint",
    [each for each in ENDPOINTS if each.method == "GET"],
    ids=lambda each: each.route,
)
async def test_what_is_got_loads_and_fetches_nothing(
    client: AsyncClient, engines: ScriptedEngines, endpoint: Endpoint
) -> None:
    """Browsers send no mark of another site to a gateway that they know by another name."""
    path = PATH_PARAMETER.sub(lambda match: STEPS[match[1]], endpoint.path)
    for query in ("", "?model=writer", "?model=org/judge", "?model=org/new", "?model=hub:org/new"):
        async with client.stream("GET", f"{path}{query}") as answer:
            assert answer.status_code in (200, 400, 404, 429)
    assert engines.loads == []
    models = (await client.get("/v1/models")).json()["data"]
    assert {model["state"] for model in models} == {"unloaded"}


async def test_where_every_origin_is_allowed_a_page_need_not_name_its_own(tmp_path: Path) -> None:
    engines = ScriptedEngines()
    async with served(some_models(tmp_path), engines, cors_origins="*") as client:
        for headers in asked("GET", "cross-site", "https://any.example").values():
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
        link: dict[str, Any] = {"sec-fetch-site": "cross-site", "host": "evil.example"}
        assert (await client.get("/v1/models", headers=link)).status_code == 403


async def test_the_tokenizer_of_a_model_that_is_not_loaded_is_described_and_it_stays_so(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    answer = await client.get("/v1/tokenizer_info?model=writer")
    assert answer.json()["chat_template"] == "{{ messages }}"
    engines.unfetched.add("writer")
    refused = await client.get("/v1/tokenizer_info?model=writer")
    engines.unfetched.clear()
    assert (refused.status_code, code_of(refused)) == (404, "model_not_found")
    assert engines.loads == []
