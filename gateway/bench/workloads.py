"""A kind of work → its requests, each with the judge of its answer.

Their texts are the same for the same seed, and no two are alike, so that no cache helps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

import orjson

from gateway.bench import judging
from gateway.bench.judging import Judge
from gateway.bench.kinds import Kind

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

_PAGE = (
    "the a one every old new small large quiet bright river mountain garden station market "
    "library engine letter window morning evening winter summer child teacher farmer doctor "
    "reads writes finds carries opens closes follows answers remembers builds paints repairs "
    "slowly quickly often never always under over beside behind near between without because"
)
WORDS = _PAGE.split()


class Texts:
    """Numbered texts; their numbers of words go round `lengths`."""

    def __init__(self, seed: int, lengths: Sequence[int]) -> None:
        self._seed = seed
        self._lengths = lengths

    def __getitem__(self, number: int) -> str:
        # The number comes first: texts that differ only at their end share a prefix, which
        # servers may keep.
        random = Random(self._seed << 40 | number)
        length = self._lengths[number % len(self._lengths)]
        return " ".join((str(number), *random.choices(WORDS, k=length - 1)))


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its path and body, and the judge of its answer."""

    path: str
    body: bytes
    judge: Judge
    is_streamed: bool = False


class Form:
    """A schema for answers, and the judge of whether an answer matches it."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.schema = schema
        self.judge = judging.expect_schema(schema)


class Workload:
    """An endless sequence of numbered requests; each is sent once, by the next free client."""

    def __init__(self, unit: str, make: Callable[[int], Ask]) -> None:
        self.unit = unit
        self._make = make
        self._numbers = count()

    def next(self) -> Ask:
        """Make the next request."""
        return self._make(next(self._numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """What the requests of a kind contain: some of `texts`, one of `prompts`, or both: the
    documents to rerank, and the query.
    """

    model: str
    texts: Texts
    texts_per_request: int
    prompts: Texts
    max_tokens: int

    def inputs(self, number: int) -> list[str]:
        """Return the texts that request `number` embeds or reranks."""
        first = number * self.texts_per_request
        return [self.texts[first + i] for i in range(self.texts_per_request)]

    def workload(self, kind: Kind) -> Workload:
        """Return the workload of a kind."""
        match kind:
            case Kind.EMBEDDINGS:
                return Workload("vectors", lambda n: embeddings(self.model, self.inputs(n)))
            case Kind.RERANK:
                return Workload(
                    "pairs", lambda n: rerank(self.model, self.prompts[n], self.inputs(n))
                )
            case Kind.CHAT:
                return self._chat(is_streamed=True)
            case Kind.STRUCTURED:
                return self._chat(form=Form(PERSON))
            case Kind.LOGPROBS:
                return self._chat(top_logprobs=TOP_LOGPROBS)
            case Kind.MIXED:
                raise AssertionError("mixed work is several workloads")

    def _chat(self, **options: Any) -> Workload:
        def make(number: int) -> Ask:
            prompt = self.prompts[number]
            return chat(self.model, prompt, max_tokens=self.max_tokens, **options)

        return Workload("tokens", make)


def embeddings(model: str, inputs: Sequence[str]) -> Ask:
    """Make a request for vectors, in base64 as OpenAI's SDKs do."""
    body = {"model": model, "input": list(inputs), "encoding_format": "base64"}
    return Ask("/embeddings", orjson.dumps(body), judging.expect_vectors(len(inputs)))


def rerank(model: str, query: str, documents: Sequence[str]) -> Ask:
    """Make a request to sort all documents, in Cohere's form."""
    body = {"model": model, "query": query, "documents": list(documents)}
    return Ask("/rerank", orjson.dumps(body), judging.expect_scores(len(documents)))


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
    """Make a greedy chat request: free, held to a form, or with logprobs."""
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    judge: Judge = judging.judge_text
    if form is not None:
        named = {"name": "answer", "schema": form.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
        judge = form.judge
    if top_logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": top_logprobs}
        judge = judging.expect_logprobs(top_logprobs)
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Ask("/chat/completions", orjson.dumps(body), judge, is_streamed)
