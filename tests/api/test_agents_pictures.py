"""The first requests with a picture of Claude Code, Codex, opencode, Cline and Open WebUI.

agents_pictures.json has their shapes. Those of Claude Code 2.1.197, Codex 0.169.0, opencode 1.18.33
and Cline 3.0.65 were recorded as `launch` runs them (compat_tests/agents), their texts and most
tools left out: a picture is named in the question, or the agent's own tool reads it. Open WebUI's
follows its source (src/lib/components/chat/Chat.svelte, and convert_url_images_to_base64 in
backend/open_webui/utils/middleware.py): the question, then each picture as a data URL without a
detail.
"""

import base64
import io
import json
import random
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from httpx2 import AsyncClient, Response
from PIL import Image

from gateway.jobs.steps import ImageCost
from tests.cpu_engines import cpu_engines
from tests.engine.vision.harness import write_seeing
from tests.fakes import ScriptedChat, ScriptedEngines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio
SHAPES: Final[dict[str, Any]] = json.loads(
    Path(__file__).with_name("agents_pictures.json").read_text("utf-8")
)
READ: Final = [name for name in SHAPES if "reads" in name]
NAMED: Final = [name for name in SHAPES if name not in READ]
COUNTS: Final = {
    "/v1/messages": "/v1/messages/count_tokens",
    "/v1/responses": "/v1/responses/input_tokens",
}
DATA_URL: Final = "data:image/png;base64,"


@cache
def picture(width: int, height: int) -> str:
    """Give a PNG of noise as base64, which no compression makes short."""
    pixels = random.Random(width).randbytes(width * height * 3)
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), pixels).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


def showing(shape: Any, digits: str) -> Any:
    """Put a picture into a shape."""
    match shape:
        case {"type": "base64", "data": str(), **more}:
            return {"type": "base64", "data": digits, **more}
        case dict():
            return {name: showing(each, digits) for name, each in shape.items()}
        case list():
            return [showing(each, digits) for each in shape]
    return shape.replace("…", digits) if str(shape).startswith(DATA_URL) else shape


def asked(name: str, digits: str, **more: Any) -> tuple[str, dict[str, Any]]:
    """Give the path of a request, and its body with a picture."""
    return SHAPES[name]["path"], {**showing(SHAPES[name]["body"], digits), **more}


@pytest.fixture
async def seeing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncClient]:
    """Serve a tiny model that sees, and decode its pictures for true."""
    folder = tmp_path_factory.mktemp("seeing")
    write_seeing("qwen3_vl", folder / "model")
    models = catalog(folder, {"seeing": {"kind": "chat", "source": "path:model"}})
    async with served(models, cpu_engines()) as client:
        yield client


async def _prompt_tokens(client: AsyncClient, name: str, digits: str) -> int:
    """Return the tokens of a request's prompt, as an answer's usage and as a count before it."""
    path, body = asked(name, digits, stream=False)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    answer = await client.post(path, json={**body, limit: 4})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    if path == "/v1/messages":
        tokens = sum(count for each, count in usage.items() if each.endswith("input_tokens"))
    else:
        kind = "input" if path == "/v1/responses" else "prompt"
        tokens = usage[f"{kind}_tokens"]
        assert usage[f"{kind}_tokens_details"]["image_tokens"] in (24, 48)
    if path in COUNTS:
        counted = await client.post(COUNTS[path], json=body)
        assert counted.json()["input_tokens"] == tokens, counted.text
    return int(tokens)


async def test_a_picture_costs_the_tokens_of_its_grid(seeing: AsyncClient) -> None:
    """A token is a square of 8 pixels; base64 costs nothing, in a tool's result too."""
    large, small = picture(64, 48), picture(32, 48)
    assert len(large) > 8_000
    for name in SHAPES:
        tokens = await _prompt_tokens(seeing, name, large)
        assert 48 < tokens < 400, name
        assert tokens - await _prompt_tokens(seeing, name, small) == 48 - 24, name


def _job_text(chat: ScriptedChat) -> str:
    return "\n".join(str(turn["content"]) for turn in chat.jobs[-1].messages)


@pytest.mark.parametrize("name", SHAPES)
async def test_the_picture_stands_where_the_agent_put_it(
    client: AsyncClient, engines: ScriptedEngines, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A stream is begun, and nothing but Claude Code's own context management is ignored."""
    monkeypatch.setattr(ScriptedChat, "images", ImageCost())
    path, body = asked(name, picture(64, 48), model="writer")
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    is_claude = name.startswith("claude")
    assert answer.headers.get("x-gateway-ignored") == ("context_management" if is_claude else None)
    job = engines.chat.jobs[-1]
    (image,) = job.images
    assert image.data == base64.b64decode(picture(64, 48))
    (turn,) = (turn for turn in job.messages if image.word in (turn["content"] or ""))
    is_result = name in READ and path != "/v1/chat/completions"
    assert turn["role"] == ("tool" if is_result else "user")
    if name.startswith("codex") and not is_result:
        before, _, after = turn["content"].partition(image.word)
        assert before.rstrip().endswith('path="red.png">')
        assert after.lstrip().startswith("</image>")


async def _without_images(client: AsyncClient, name: str) -> Response:
    path, body = asked(name, picture(32, 48), model="writer", stream=False)
    return await client.post(path, json=body, headers={"x-gateway-leave-out-images": "true"})


@pytest.mark.parametrize("name", READ)
async def test_a_picture_that_a_tool_read_is_left_out_for_a_model_that_reads_text(
    client: AsyncClient, engines: ScriptedEngines, name: str
) -> None:
    """opencode and Cline send it in a user's message behind the result, which is no question."""
    answer = await _without_images(client, name)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-gateway-images-left-out"] == "1"
    assert "[image left out: this model reads text]" in _job_text(engines.chat)


@pytest.mark.parametrize("name", NAMED)
async def test_a_picture_of_the_question_is_refused_by_a_model_that_reads_text(
    client: AsyncClient, name: str
) -> None:
    """Claude Code knows the first words, takes the picture out by itself and asks again."""
    answer = await _without_images(client, name)
    assert answer.status_code == 400
    assert "Could not process image" in answer.json()["error"]["message"]
