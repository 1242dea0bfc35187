"""Requests by the thousand: bodies that no schema describes, and those of /openapi.json."""

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import orjson
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from gateway.api.endpoints import ENDPOINTS
from gateway.api.openapi import document
from gateway.api.requests import Exposure
from gateway.registry import Catalog
from tests.fuzz.asking import LENGTHS, POSTS, Ask, check
from tests.generators import within_share

FIELDS = {
    endpoint.bare_path: [
        *endpoint.request.served_fields(),
        *sorted(endpoint.request.harmless),
        *endpoint.request.refused,
        "nobody-knows",
    ]
    for endpoint in ENDPOINTS
    if endpoint.request is not None
}
ODD = [
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e-999", b"-0", b"00", b"1.", b".5", b"+1"),
    *(b"1" * 400, b"-" + b"9" * 25, b"9223372036854775808", b"18446744073709551616", b"1e400"),
    *(b"1.0", b"0.0", b"-1", b"4294967296", b"true", b"false", b"null", b"nul", b""),
    *(b'"\\ud800"', b'"\\udfff\\ud800"', b'"\\ud83d\\ude00"', b'"\\u0000"'),
    *(b'"\xff"', b'"\xed\xa0\x80"'),
    *(b'"\x00"', b'"\xef\xbb\xbf"', b'"unended', b'"\\x"', b"'a'", b'""', b'" "'),
    *(b"[]", b"{}", b"[[]]", b"[null]", b"[{}]", b'{"":{}}', b"[" * 300 + b"]" * 300, b"[" * 2000),
    *(b'{"a":' * 70 + b"1" + b"}" * 70, b'{"a":1,"a":"b"}', b'{"__proto__":1}', b"[1,]"),
    *(b"/* */1", b'"' + b"x" * 100_000 + b'"', b'["' + b'","' * 5000 + b'"]', b'"\\u202e{{7*7}}"'),
    *(b'{"type":"json_schema"}', b'{"type":"json_schema","json_schema":null}', b'{"json":"{"}'),
    *(b'{"$ref":"#"}', b'{"$ref":"#/nowhere"}', b'{"properties":{"a":{"$ref":"#"}}}'),
    *(b'"(((((((((("', b'"(a*)*b"', b'"[a-"', b'"a{99999}"', b'"\\\\p{Nope}"', b'"start: start"'),
    *(b'{"1":1}', b'{"-1":1}', b'{"99999999999999999999":1}', b'{"\xd9\xa3":1}', b'{"1":1e308}'),
    *(b'[{"role":"user"}]', b'[{"role":"user","content":[]}]', b'[{"role":"assistant"}]'),
    *(b'[{"role":"tool","content":"x"}]', b'[{"role":"system","content":""}]', b'{"a":1,}'),
    b'[{"type":"reasoning"}]',
]
TIMES = ["nan", "inf", "-1", "0", "1e400", "abc", "", "1", "0x10", "1_0", "9" * 400]


def field(path: str) -> st.SearchStrategy[bytes]:
    """Give a request that is well but for one field, which may come twice."""

    def put(name: str, value: bytes, *, first: bool) -> bytes:
        rest = orjson.dumps(POSTS[path])[1:-1]
        added = orjson.dumps(name) + b":" + value
        return b"{" + (added + b"," + rest if first else rest + b"," + added) + b"}"

    values = st.one_of(st.sampled_from(ODD), st.binary(max_size=20))
    return st.builds(put, st.sampled_from(FIELDS[path]), values, first=st.booleans())


def broken(path: str) -> st.SearchStrategy[bytes]:
    """Give a request that is well but for some bytes of it."""
    well = orjson.dumps(POSTS[path])

    def cut(at: int, length: int, put: bytes) -> bytes:
        return well[:at] + put + well[at + length :]

    return st.builds(cut, st.integers(0, len(well)), st.integers(0, 5), st.binary(max_size=5))


def bounded(examples: int, *, is_repeated: bool) -> settings:
    """Give hypothesis this number of examples; the same each time if `is_repeated`."""
    checks = list(HealthCheck)
    given: dict[str, Any] = {"database": None, "deadline": None, "suppress_health_check": checks}
    return settings(max_examples=examples, derandomize=is_repeated, **given)


def send_bodies(ask: Ask, path: str, examples: int, *, is_repeated: bool) -> None:
    """Send bodies that no client would; the same each time if `is_repeated`."""
    bodies = st.one_of(field(path), field(path), broken(path), st.binary(), st.sampled_from(ODD))
    times = st.one_of(st.none(), st.none(), st.none(), st.sampled_from(TIMES))

    @bounded(examples, is_repeated=is_repeated)
    @given(body=bodies, time=times)
    @within_share
    def send(body: bytes, time: str | None) -> None:
        headers = {} if time is None else {"x-gateway-timeout-s": time}
        check(ask(path, body, headers))

    send()


def send_odd_values(ask: Ask, path: str) -> None:
    """Send every odd value in every field."""
    rest = orjson.dumps(POSTS[path])[1:-1]
    for name in FIELDS[path]:
        for value in ODD:
            check(ask(path, b"{" + rest + b"," + orjson.dumps(name) + b":" + value + b"}"))


def send_documented(
    ask: Ask, models: Catalog, path: str, mode: GenerationMode, examples: int, *, is_repeated: bool
) -> None:
    """Send schemathesis's requests for the document; the same each time if `is_repeated`."""
    exposure = Exposure(has_keys=False, has_admin=False, has_dashboard=False)
    told = document(models, ENDPOINTS, exposure, strict=False)
    operation = schemathesis.openapi.from_dict(told)[path]["POST"]
    post = told["paths"][path]["post"]
    schema = post["requestBody"]["content"]["application/json"]["schema"]
    allowed = jsonschema.Draft202012Validator({**schema, "components": told["components"]})

    @bounded(examples, is_repeated=is_repeated)
    @given(case=operation.as_strategy(generation_mode=mode))
    @within_share
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
