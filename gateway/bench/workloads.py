"""A kind of work → its requests, each with the judge of its answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import orjson

from gateway.bench import judging
from gateway.bench.judging import Judge
from gateway.bench.kinds import Kind
from gateway.bench.texts import Texts

TOP_LOGPROBS = 2
PERSON: Mapping[str, Any] = {
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


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: where it goes, what it says, and how its answer is judged."""

    path: str
    body: bytes
    judge: Judge
    is_streamed: bool = False


class Form:
    """A schema for answers, and what tells whether they keep to it."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.schema = schema
        self.judge = judging.structured(schema)


class Workload:
    """Requests without end, numbered: each is asked once, by whichever client is free."""

    def __init__(self, unit: str, make: Callable[[int], Ask]) -> None:
        self.unit = unit
        self._make = make
        self._numbers = count()

    def next(self) -> Ask:
        """Make the next request."""
        return self._make(next(self._numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """What the requests of a kind say. `texts` a request are embedded, a prompt is answered."""

    model: str
    texts: Texts
    texts_per_request: int
    prompts: Texts
    max_tokens: int

    def inputs(self, number: int) -> list[str]:
        """Give the texts that request `number` embeds."""
        first = number * self.texts_per_request
        return [self.texts[first + i] for i in range(self.texts_per_request)]

    def workload(self, kind: Kind) -> Workload:
        """Give the requests of a kind."""
        match kind:
            case Kind.EMBEDDINGS:
                return Workload("vectors", lambda n: embeddings(self.model, self.inputs(n)))
            case Kind.CHAT:
                return self._generated(is_streamed=True)
            case Kind.STRUCTURED:
                return self._generated(form=Form(PERSON))
            case Kind.LOGPROBS:
                return self._generated(top_logprobs=TOP_LOGPROBS)
            case Kind.MIXED:
                raise AssertionError("mixed work is several workloads")

    def _generated(self, **options: Any) -> Workload:
        def make(number: int) -> Ask:
            prompt = self.prompts[number]
            return chat(self.model, prompt, max_tokens=self.max_tokens, **options)

        return Workload("tokens", make)


def embeddings(model: str, inputs: Sequence[str]) -> Ask:
    """Ask for vectors, in base64 as OpenAI's SDKs do."""
    body = {"model": model, "input": list(inputs), "encoding_format": "base64"}
    return Ask("/embeddings", orjson.dumps(body), judging.vectors(len(inputs)))


def chat(
    model: str,
    prompt: str,
    *,
    max_tokens: int,
    system: str | None = None,
    form: Form | None = None,
    top_logprobs: int | None = None,
    is_streamed: bool = False,
) -> Ask:
    """Ask greedily for an answer: free, held to a form, or with its logprobs."""
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    judge: Judge = judging.text
    if form is not None:
        named = {"name": "answer", "schema": form.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
        judge = form.judge
    if top_logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": top_logprobs}
        judge = judging.logprobs(top_logprobs)
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Ask("/chat/completions", orjson.dumps(body), judge, is_streamed)
