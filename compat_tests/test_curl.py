"""curl, as pasted from the README."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")


def curl(*arguments: str) -> str:
    """Run curl, failing on its own errors but not on HTTP ones."""
    done = subprocess.run(["curl", "-sS", *arguments], check=True, capture_output=True, timeout=60)
    return done.stdout.decode()


def post(url: str, body: dict[str, Any], *arguments: str) -> str:
    """Post JSON as most people do: without saying that it is."""
    return curl(url, "-d", json.dumps(body), *arguments)


def test_embeddings(url: str) -> None:
    answer = json.loads(post(f"{url}/v1/embeddings", {"model": "all-minilm-l6-v2", "input": "hi"}))
    assert len(answer["data"][0]["embedding"]) == 384


def test_a_chat_stream_is_flushed_line_by_line(url: str) -> None:
    """-N shows each token as it comes; the last line is [DONE]."""
    body = {
        "model": "demo-chat",
        "messages": [{"role": "user", "content": "Hello!"}],
        "stream": True,
    }
    lines = post(f"{url}/v1/chat/completions", body, "-N").splitlines()
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"
    assert sum(line.startswith("data: ") for line in lines) > 4


def test_a_large_body_is_taken_and_a_text_too_long_is_cut_and_told(
    url: str, tmp_path: Path
) -> None:
    """curl asks with Expect: 100-continue above a megabyte."""
    file = tmp_path / "body.json"
    file.write_text(json.dumps({"model": "all-minilm-l6-v2", "input": ["word " * 150_000] * 2}))
    answer = curl(f"{url}/v1/embeddings", "-d", f"@{file}", "-D", "-")
    assert "x-gateway-truncated: 2" in answer
    assert '"index":1' in answer


def test_whoever_asks_for_http2_is_answered_in_http1(url: str) -> None:
    """curl asks for an upgrade by itself; a proxy in front may speak HTTP/2."""
    answer = curl(f"{url}/v1/models", "--http2", "-w", "%{http_version}")
    assert answer.endswith("1.1")


def test_a_wrong_path_gets_the_envelope(url: str) -> None:
    answer = curl(f"{url}/v2/chat", "-i")
    assert "404" in answer.splitlines()[0]
    assert "x-request-id: req-" in answer
    assert json.loads(answer.splitlines()[-1])["error"]["code"] == "unknown_url"
