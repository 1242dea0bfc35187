"""What /openapi.json allows, and what it forbids, by the thousand: all of it is answered."""

import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import orjson
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from gateway.api.endpoints import ENDPOINTS
from gateway.api.openapi import document
from gateway.api.requests import Exposure
from gateway.registry import Catalog
from tests.fuzz.asking import LENGTHS, POSTS, Ask, asking, check, scripted

pytestmark = pytest.mark.slow

SHORT, LONG = 50, 2000  # requests of each kind to each endpoint


def fuzzed(ask: Ask, models: Catalog, path: str, mode: GenerationMode, examples: int) -> None:
    """Send what schemathesis makes of the document."""
    exposure = Exposure(has_keys=False, has_admin=False, has_dashboard=False)
    told = document(models, ENDPOINTS, exposure, strict=False)
    operation = schemathesis.openapi.from_dict(told)[path]["POST"]
    post = told["paths"][path]["post"]
    schema = post["requestBody"]["content"]["application/json"]["schema"]
    allowed = jsonschema.Draft202012Validator({**schema, "components": told["components"]})

    @settings(
        max_examples=examples,
        derandomize=examples == SHORT,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case[Any]) -> None:
        body = written(path, case.body)
        answer = ask(path, body)
        check(answer)
        assert str(answer.status_code) in post["responses"]
        if answer.status_code == 200:
            allowed.validate(orjson.loads(body))

    send()


def written(path: str, body: Any) -> bytes:
    """Write a body. Models that exist are asked, and answers are kept short."""
    if isinstance(body, bytes):
        return body
    if isinstance(body, dict):
        if isinstance(body.get("model"), str):
            body = {**body, "model": POSTS[path]["model"]}
        if path in LENGTHS and not isinstance(body.get(LENGTHS[path]), str | list | dict):
            body = {**body, LENGTHS[path]: 3}
        if isinstance(body.get("n"), int) and body["n"] > 2:
            body = {**body, "n": 2}
    return json.dumps(body, default=str).encode()


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", POSTS)
def test_whatever_the_document_says_is_answered(
    path: str, mode: GenerationMode, tmp_path: Path
) -> None:
    """With a status that it tells, never a 500, and never a 200 to what it forbids."""
    models, engines = scripted(tmp_path)
    with asking(models, engines) as ask:
        fuzzed(ask, models, path, mode, SHORT)
