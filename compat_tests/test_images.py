"""Images by unchanged clients, for a tiny model whose weights are random: its words mean nothing,
and other images give other words.
"""

import base64
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx2
import openai
import pytest
from openai import OpenAI

from compat_tests.conftest import started
from compat_tests.test_python_clients import PYTHON, SESSION_LOOP, run
from tests.engine.vision.harness import write_seeing
from tests.processes import ROOT

PICTURES: Final = ROOT / "tests" / "golden" / "vision"
FILES: Final = [PICTURES / "wide.png", PICTURES / "tall.png"]
WIDE, TALL = (
    f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}" for file in FILES
)
CLIENTS: Final = Path(__file__).parent / "clients"
NEEDS_CLIENTS = pytest.mark.skipif(not PYTHON.exists(), reason="`make setup-clients` installs them")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the model `seeing`, and give the address."""
    folder = tmp_path_factory.mktemp("seeing")
    write_seeing("qwen3_vl", folder / "model")
    models = folder / "models.yaml"
    models.write_text("version: 1\nmodels:\n  seeing: {kind: chat, source: 'path:model'}\n")
    with started(folder, models) as address:
        yield address


def shown(*urls: str) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": each}} for each in urls]
    return [{"role": "user", "content": [{"type": "text", "text": "Look:"}, *parts]}]


def ask(client: OpenAI, messages: Any) -> Any:
    return client.chat.completions.create(
        model="seeing", messages=messages, max_tokens=12, temperature=0
    )


def test_openais_chat_answers_about_an_image_and_counts_it(client: OpenAI) -> None:
    wide, tall = ask(client, shown(WIDE)), ask(client, shown(TALL))
    assert wide.choices[0].message.content != tall.choices[0].message.content
    again = ask(client, shown(WIDE))
    assert again.choices[0].message.content == wide.choices[0].message.content
    details = [each.usage.prompt_tokens_details.image_tokens for each in (wide, tall, again)]
    assert details[0] == details[2] > 0
    both = ask(client, shown(WIDE, TALL)).usage
    assert both.prompt_tokens_details.image_tokens == details[0] + details[1]
    assert both.prompt_tokens > details[0] + details[1]


def test_openais_stream_says_the_same(client: OpenAI) -> None:
    whole = ask(client, shown(TALL)).choices[0].message.content
    chunks = client.chat.completions.create(
        model="seeing", messages=shown(TALL), max_tokens=12, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_openais_responses_keep_an_image(client: OpenAI) -> None:
    """A later question has it in its prompt, and so does a call's output."""
    content: Any = [{"type": "input_image", "image_url": WIDE, "detail": "auto"}]
    asked: Any = {"model": "seeing", "max_output_tokens": 12, "temperature": 0}
    first = client.responses.create(**asked, input=[{"role": "user", "content": content}])
    second = client.responses.create(**asked, input="And?", previous_response_id=first.id)
    alone = client.responses.create(**asked, input="And?")
    assert first.usage is not None
    assert second.usage is not None
    assert alone.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens > alone.usage.input_tokens
    call: Any = {"type": "function_call", "call_id": "c1", "name": "screenshot", "arguments": "{}"}
    output: Any = {"type": "function_call_output", "call_id": "c1", "output": content}
    told = client.responses.create(**asked, input=[call, output])
    assert told.usage is not None
    details: Any = told.usage.input_tokens_details
    assert details.image_tokens > 0


@pytest.mark.parametrize("address", ["https://x.test/a.png", "file:///etc/passwd"])
def test_an_address_is_the_sdks_bad_request(client: OpenAI, address: str) -> None:
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content\[1\]"):
        ask(client, shown(address))


@NEEDS_CLIENTS
@pytest.mark.compat
def test_anthropics_sdk_sends_images(url: str) -> None:
    command = [str(PYTHON), str(CLIENTS / "anthropic_images.py"), url, *map(str, FILES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "passed\n"), done.stderr


@NEEDS_CLIENTS
@pytest.mark.compat
def test_langchains_image_tests_pass(url: str) -> None:
    code, printed = run(
        "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", ".", *SESSION_LOOP, "-k",
        "image or anthropic_inputs", "langchain_suite.py", url=f"{url}/v1", model="seeing",
    )  # fmt: skip
    assert code == 0, printed
    assert (passed := re.search(r"(\d+) passed", printed)), printed
    assert int(passed[1]) == 3, printed
    assert "skipped" not in printed


def test_decoding_is_timed(url: str, client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="seeing", messages=shown(WIDE), max_tokens=1
    )
    assert "images;dur=" in raw.headers["server-timing"]
    assert "tokenise" not in raw.headers["server-timing"]
    metrics = httpx2.get(f"{url}/metrics").text
    for outcome in ("measured", "decoded"):
        assert f'gateway_image_decode_seconds_count{{outcome="{outcome}"}}' in metrics
