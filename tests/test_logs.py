"""Log lines: they record events, and nobody's secrets."""

import io
import json
import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import pytest
import structlog

from gateway import logs
from tests.fakes import ScriptedEngines
from tests.serving_app import catalog, served

Style = Literal["json", "console"]

PREDICATE = {"type": "predicate", "instructions": "It is late."}


@contextmanager
def writing(style: Style, to: io.StringIO | None = None) -> Iterator[io.StringIO]:
    """Give the lines that are logged meanwhile."""
    to = io.StringIO() if to is None else to
    with patch.object(logs, "sys", SimpleNamespace(stderr=to)):  # pytest replaces sys.stderr
        try:
            logs.configure("debug", style)
            yield to
        finally:
            structlog.contextvars.clear_contextvars()
            structlog.reset_defaults()


@pytest.fixture
def console() -> Iterator[io.StringIO]:
    with writing("console") as to:
        yield to


@pytest.mark.parametrize("style", ["json", "console"])
def test_a_logged_exception_shows_no_variables(style: Style) -> None:
    with writing(style) as to:
        _fail("sk-secret-key")
    assert "ValueError" in to.getvalue()
    assert "sk-secret" not in to.getvalue()
    assert len(to.getvalue()) < 5000


def _fail(key: str) -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        logs.get("test").exception("failed")


def test_a_line_is_written_whatever_it_says() -> None:
    """A lone surrogate of a file's name, a huge number, an object: each in a line of JSON."""
    with writing("json") as to:
        for odd in ("\udcff", 2**80, object(), {("a", "b"): 1}):
            logs.get("test").info("odd", said=odd)
    lines = [json.loads(line) for line in to.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["odd"] * 4


@pytest.mark.parametrize("style", ["json", "console"])
def test_a_line_is_one_write(style: Style) -> None:
    """Ranks share a log: a line written in two pieces may have another's line between them."""
    pieces: list[str] = []

    class Recorder(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    with writing(style, Recorder()):
        logs.get("test").info("whole")
    [line] = pieces
    assert line.endswith("\n")


def test_a_line_of_json_is_as_it_was() -> None:
    """Keys, order and numbers: programs read it."""
    with writing("json") as to:
        asked(path="/x\n…", bytes=2**30)
    line = re.sub(r'"timestamp":"[^"]+Z"', '"timestamp":"T"', to.getvalue())
    assert line == (
        '{"part":"http","method":"GET","path":"/x\\n…","status":200,"ms":1.25,"bytes":1073741824,'
        '"event":"request","level":"info","timestamp":"T"}\n'
    )


def asked(**given: Any) -> None:
    logs.get("http").info(
        "request", **{"method": "GET", "path": "/x", "status": 200, "ms": 1.25, **given}
    )


def test_a_consoles_line_of_a_request_begins_with_what_matters(console: io.StringIO) -> None:
    """Method, path, status and milliseconds; then the model, its tokens and whose it is."""
    structlog.contextvars.bind_contextvars(request_id="req-0123456789abcdef01234567")
    asked(method="POST", path="/v1/embeddings", load_ms=2.5, model="m", tokens_in=3, tokens_out=4)
    asked(ms=12345.6)
    first, second = console.getvalue().splitlines()
    assert re.fullmatch(
        r"POST /v1/embeddings 200 1\.2 ms m 3\+4 tokens [\d:]{8} req-01234567… load_ms=2\.5", first
    )
    assert second.startswith("GET /x 200 12,346 ms ")


@pytest.mark.parametrize(
    "odd",
    [
        *("a" * 5000, "漢" * 5000, "e\u0301" * 3000, '"' * 500, "\x1b[2J" * 200, "a b" * 100),
        *("\udcff" * 90, ""),
    ],
)
def test_a_consoles_line_fits_whatever_is_in_it(console: io.StringIO, odd: str) -> None:
    structlog.contextvars.bind_contextvars(request_id=odd or "x")
    asked(path=odd, model=odd, tokens_in=10**9, method=odd[:50] or "GET", other=odd)
    logs.get("cache").info("model_loaded", model=odd, more={odd: [odd]}, bytes=5)
    request, loaded = console.getvalue().splitlines()
    assert " 200 1.2 ms " in request
    for line in (request, loaded):
        wide = sum(unicodedata.east_asian_width(each) in "WF" for each in line)
        combining = sum(unicodedata.combining(each) > 0 for each in line)
        assert len(line) + wide - combining <= logs.COLUMNS
        assert line.isprintable()


@pytest.mark.parametrize("odd", ["\n", "\r", "\x1b[2J", "\u2028", "\u202e", "\x85", "\x00"])
def test_nobody_writes_a_line_or_moves_the_cursor_of_a_console(
    console: io.StringIO, odd: str
) -> None:
    """Neither by a path, nor by a field, its name or a value inside, nor by an error's text."""
    smuggled = f"{odd}GET /forged 200 1.0 ms"
    asked(path=f"/{smuggled}", method=smuggled, model=smuggled, **{f"k{odd}": {odd: [odd]}})
    log = logs.get("http")
    log.warning("failed", error=smuggled * 9)
    try:
        raise ValueError(smuggled)
    except ValueError:
        log.exception("failed")
    lines = console.getvalue().split("\n")
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("GET /forged") for line in lines)
    assert sum(not line.startswith("    ") for line in lines if line) == 3


@pytest.mark.anyio
@pytest.mark.parametrize("style", ["json", "console"])
@pytest.mark.parametrize(
    "end", ["\r\n", "\n", "\r", "\x0b", "\x7f", "\x85", "\x9b2K", "\u2028", "\u202e", "\x1b[1A"]
)
async def test_no_request_writes_a_line_of_its_own(tmp_path: Path, style: Style, end: str) -> None:
    """No path, field name or prompt does, wherever a reader or a terminal ends lines."""
    forged = f'{end}{{"event":"forged"}}'
    models = catalog(tmp_path, {"writer": {"kind": "chat", "source": "path:.", "preload": False}})
    said = [{"role": "user", "content": f"p{forged}"}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {"messages": said}),
        ("responses", {"input": f"p{forged}"}),
        ("completions", {"prompt": f"p{forged}", f"field{forged}": 1}),
        ("messages", {"max_tokens": 3, "messages": said}),
    ]
    with writing(style) as to:
        async with served(models, ScriptedEngines(), log_prompts=True) as client:
            escaped = "".join(f"%{byte:02X}" for byte in forged.encode())
            await client.delete(f"/v1/stream{escaped}?conv_id={escaped}")
            for path, body in bodies:
                await client.post(f"/v1/{path}", json={"model": "writer", **body})
    lines = to.getvalue().removesuffix("\n").split("\n")
    assert sum("forged" in line for line in lines) >= 5
    assert all(line.isprintable() for line in lines)
    assert not any(line.lstrip().startswith('{"event":"forged"') for line in lines)
    if style == "json":
        assert all("part" in json.loads(line) for line in lines)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("messages", {"max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}),
        ("responses", {"input": "hi"}),
        ("completions", {"prompt": "hi"}),
        ("decisions", {"input": "hi", "questions": [PREDICATE]}),
        ("embeddings", {"input": "hi"}),
        ("rerank", {"query": "hi", "documents": ["there"]}),
        ("tokenize", {"prompt": "hi"}),
        ("detokenize", {"tokens": [104, 105]}),
    ],
)
async def test_a_prompt_is_logged_whatever_the_endpoint(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    kind = "embedding" if path in ("embeddings", "rerank") else "chat"
    models = catalog(tmp_path, {"m": {"kind": kind, "source": "path:.", "preload": False}})
    with writing("json") as to:
        async with served(models, ScriptedEngines(), log_prompts=True) as client:
            prefix = "" if path.endswith("tokenize") else "/v1"
            await client.post(f"{prefix}/{path}", json={"model": "m", **body})
    lines = [json.loads(line) for line in to.getvalue().splitlines()]
    [said] = [line for line in lines if line["event"] == "prompt"]
    assert ("hi" in str(said)) == (path != "detokenize")


def test_a_path_cannot_pass_for_what_comes_after_it(console: io.StringIO) -> None:
    asked(path='/x" 200 1.0 ms', status=404)
    assert console.getvalue().startswith('GET "/x\' 200 1.0 ms" 404 1.2 ms ')


def test_what_a_console_warns_of_is_told_whole(console: io.StringIO) -> None:
    hint = " ".join(f"word{number}" for number in range(60))
    logs.get("serve").warning("slow", hint=hint, glued="x" * 250)
    lines = console.getvalue().splitlines()
    assert all(len(line) <= logs.COLUMNS for line in lines)
    assert lines[0].startswith("warning: slow ")
    assert all(line.startswith("    ") for line in lines[1:])
    assert hint in " ".join(line.strip() for line in lines)
    assert "x" * 250 in "".join(line.strip() for line in lines)


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (768 * 2**20, "768 MiB"),
        (2**30, "1.0 GiB"),
        (17.7 * 2**30, "17.7 GiB"),
        (5 * 2**40, "5120.0 GiB"),
    ],
)
def test_a_console_tells_bytes_as_people_do(console: io.StringIO, count: float, said: str) -> None:
    logs.get("app").info("memory", bytes=int(count), kv_bytes=int(count))
    assert console.getvalue().rstrip().endswith(f" {said} kv_bytes={said}")


@pytest.mark.parametrize("style", ["json", "console"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("closed")])
def test_a_line_that_cannot_be_written_stops_nothing_and_is_counted(
    style: Style, error: Exception
) -> None:

    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise error

    before = logs.lost_lines
    with writing(style, Full()):
        for level in ("debug", "info", "warning", "error", "critical", "exception"):
            getattr(logs.get("test"), level)("event", key=1)
    assert logs.lost_lines == before + 6
