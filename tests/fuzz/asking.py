"""A gateway to be asked anything, from a test that is not async, and the rules for every answer."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import orjson
from anyio.from_thread import start_blocking_portal

from gateway.app.loading import Engines
from gateway.errors import BadRequest
from gateway.jobs.chat import GenerateJob
from gateway.jobs.steps import SequenceParams
from gateway.registry import Catalog
from tests.fakes import ScriptedChat, ScriptedEmbedder, ScriptedEngines
from tests.serving_app import catalog, served

USER = {"role": "user", "content": "hi"}
POSTS: dict[str, dict[str, Any]] = {
    "/embeddings": {"model": "embed", "input": "hi"},
    "/embed_sparse": {"model": "embed", "inputs": "hi"},
    "/pooling": {"model": "embed", "input": "hi", "task": "token_embed"},
    "/chat/completions": {"model": "writer", "messages": [USER]},
    "/completions": {"model": "writer", "prompt": "hi"},
    "/responses": {"model": "writer", "input": "hi"},
    "/messages": {"model": "writer", "max_tokens": 3, "messages": [USER]},
    "/decisions": {
        "model": "writer",
        "input": "hi",
        "questions": [{"type": "predicate", "instructions": "It is so."}],
    },
    "/rerank": {"model": "embed", "query": "hi", "documents": ["hi", "there"]},
    "/score": {"model": "embed", "text_1": "hi", "text_2": ["hi", "there"]},
}
LENGTHS = {
    "/chat/completions": "max_tokens",
    "/completions": "max_tokens",
    "/responses": "max_output_tokens",
    "/messages": "max_tokens",
}


class CarefulWriter(ScriptedChat):
    """Refuses token ids that are none, as the real engine does."""

    def prepare(self, job: GenerateJob) -> list[SequenceParams]:
        ids = () if job.prompt is None or isinstance(job.prompt, str) else job.prompt
        if any(token >= 0x110000 for token in ids):
            raise BadRequest("There is no such token.", part="prompt")
        return super().prepare(job)


Ask = Callable[..., httpx2.Response]


@contextmanager
def asking(models: Catalog, engines: Engines, **given: Any) -> Iterator[Ask]:
    """Serve, and give the client's `request`. One that is not answered in time raises."""
    with (
        start_blocking_portal("asyncio") as portal,
        portal.wrap_async_context_manager(served(models, engines, **given)) as client,
    ):

        def ask(path: str, body: bytes, headers: Mapping[str, str] | None = None) -> Any:
            async def post() -> httpx2.Response:
                return await client.post(path, content=body, headers=headers)

            return portal.call(post)

        yield ask


def scripted(folder: Path) -> tuple[Catalog, Engines]:
    """Give models of each kind that cost nothing."""
    common = {"source": "path:.", "preload": True}
    models = {
        "embed": {"kind": "embedding", "token_ids": "accept", "matryoshka": True, **common},
        "writer": {"kind": "chat", **common},
    }
    embedder = ScriptedEmbedder(outputs=("dense", "sparse", "multi_vector"), token_dimensions=8)
    return catalog(folder, models), ScriptedEngines(embedder, CarefulWriter())


def check(answer: httpx2.Response) -> None:
    """Check that no fault is ours, and that a refusal has its API's envelope."""
    assert answer.headers["x-request-id"]
    if answer.status_code != 200:
        assert answer.status_code != 500, answer.text
        assert answer.headers["content-type"] == "application/json"
        check_error(answer.json())
    elif answer.headers["content-type"].startswith("text/event-stream"):
        for line in answer.text.split("\n"):
            if line.startswith("data: {"):
                event = orjson.loads(line.removeprefix("data: "))
                if "error" in event:
                    check_error(event)
                    assert "engine_failed" not in line, event
    else:
        answer.json()


def check_error(body: Any) -> None:
    if "error_type" in body:  # TEI's
        assert set(body) == {"error", "error_type"}
        assert body["error"]
        return
    if "request_id" in body:  # Anthropic's
        assert set(body) == {"type", "error", "request_id"}
        assert {"type", "message"} <= set(body["error"]) <= {"type", "message", "details"}
        assert body["error"]["message"]
        return
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
