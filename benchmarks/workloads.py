"""Requests beyond those of `mlx-gateway bench`: with a system message, a schema, many at once."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import jsonschema  # type: ignore[import-untyped]
import orjson

from gateway.bench import requests
from gateway.bench.figures import Answer
from gateway.bench.load import Peer
from gateway.bench.requests import Ask, Kind, Texts, Workload, WrongAnswer, embeddings, rerank

PERSON: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "is_member": {"type": "boolean"},
        "likes": {
            "type": "array",
            "items": {"type": "string", "enum": ["music", "books", "gardens", "trains"]},
            "maxItems": 4,
        },
    },
    "required": ["name", "age", "is_member", "likes"],
    "additionalProperties": False,
}


class Form:
    """A schema for answers, and a count of the tokens of an answer that matches it."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.schema = schema
        self._validator = jsonschema.Draft202012Validator(schema)

    def count(self, answer: Any) -> int:
        tokens = requests.count_tokens(answer)
        try:
            value = orjson.loads(answer["choices"][0]["message"]["content"])
        except orjson.JSONDecodeError:
            raise WrongAnswer("answer is not JSON") from None
        if not self._validator.is_valid(value):
            raise WrongAnswer("answer does not match the schema")
        return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """The content of requests: some of `texts`, one of `prompts`, or both.

    With both, they are the documents to rerank and the query.
    """

    model: str
    texts: Texts
    texts_per_request: int
    prompts: Texts
    max_tokens: int

    def inputs(self, number: int) -> list[str]:
        """Return the texts that request `number` embeds or reranks."""
        return self.texts.part(number, self.texts_per_request)

    def workload(self, kind: Kind) -> Workload:
        match kind:
            case Kind.EMBEDDINGS:
                return Workload(lambda n: embeddings(self.model, self.inputs(n)))
            case Kind.RERANK:
                return Workload(lambda n: rerank(self.model, self.prompts[n], self.inputs(n)))
            case Kind.CHAT:
                return Workload(
                    lambda n: requests.chat(self.model, self.prompts[n], max_tokens=self.max_tokens)
                )


def chat(
    model: str,
    prompt: str,
    *,
    max_tokens: int,
    system: str | None = None,
    form: Form | None = None,
    is_streamed: bool = False,
) -> Ask:
    """Make a greedy chat request, free or held to a form."""
    free = requests.chat(model, prompt, max_tokens=max_tokens)
    body = orjson.loads(free.body)
    count = free.count
    if system is not None:
        body["messages"].insert(0, {"role": "system", "content": system})
    if form is not None:
        named = {"name": "answer", "schema": form.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
        count = form.count
    if not is_streamed:
        del body["stream"], body["stream_options"]
    return Ask(free.path, orjson.dumps(body), count, is_streamed)


async def burst(peer: Peer, workload: Workload, count: int) -> list[Answer]:
    """Send `count` requests at once and return their answers."""
    return await asyncio.gather(*(peer.ask(workload.next()) for _ in range(count)))
