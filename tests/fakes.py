"""Scripted engines: no maths, but a seam to hold, fail and watch every call."""

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import numpy as np

from gateway.app.loading import Size
from gateway.errors import (
    BadRequest,
    ContextLengthExceeded,
    Fault,
    ModelNotFound,
    ModelUnavailable,
    PassFault,
)
from gateway.jobs import Caller, TokenIds, Vectors
from gateway.jobs.chat import (
    Adapter,
    Compiled,
    Delta,
    EchoedPrompt,
    FinishReason,
    GenerateJob,
    Grammar,
    Judgement,
    Likelihood,
    Question,
    Reading,
    Sampling,
    TokenLogprob,
)
from gateway.jobs.embed import EmbedJob, Output, SparseVector, TextOutputs
from gateway.jobs.images import ImageRefused
from gateway.jobs.rerank import Pair, RerankJob
from gateway.jobs.steps import (
    EngineFacts,
    ImageCost,
    KvCost,
    LabelStep,
    Pass,
    SequenceParams,
    StepPlan,
    StepResult,
    Verdict,
)
from gateway.registry import ChatSpec, EmbeddingSpec, Inputs, ModelSpec, RerankSpec
from gateway.serving.models.named import Candidate
from gateway.serving.models.pulls import Fetched
from gateway.serving.ports import EmbeddingEngine, GenerationEngine, RerankEngine

FAR = 1e12  # a deadline beyond every test
_requests = count()


class Gate:
    """Holds the lane's thread until opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.reached = threading.Event()

    def close(self) -> None:
        self._open.clear()
        self.reached.clear()

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        self.reached.set()
        assert self._open.wait(60), "the test never opened the gate"


@dataclass
class ScriptedEmbedder:
    """A text's tokens are its characters; its vector is (length, first token, 0, 1), its weights
    how often each token is in it, and a token's vector points to one of `token_dimensions`.

    A model of multi-vectors alone has a 1 before a query, as ColBERT has a marker.
    """

    dimensions: int = 4
    max_tokens: int = 100
    vocab_size: int = 0x110000
    prompts: Mapping[str, str] = field(default_factory=lambda: {"query": "?"})
    default_prompt_name: str | None = None
    has_patterns: bool = False
    gate: Gate = field(default_factory=Gate)
    batches: list[list[int]] = field(default_factory=list)
    poison: str | None = None
    is_closed: bool = False
    token_s: float = 0.0
    steps: int = 0  # the steps of a long row before its last one
    stepped: list[int] = field(default_factory=list)
    freed_on: str | None = None  # the thread on which a row in steps ended
    outputs: tuple[Output, ...] = ("dense",)
    token_dimensions: int = 0
    query_length: int | None = None
    passes: list[set[Output]] = field(default_factory=list)  # outputs of each pass

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[ord(character) for character in text] for text in texts]

    def encode_query(self, texts: Sequence[str]) -> list[list[int]]:
        marker = [1] if self.outputs[0] == "multi_vector" else []
        return [[*marker, *row] for row in self.encode(texts)]

    @property
    def query_tokens(self) -> int:
        return self.query_length or self.max_tokens

    def encode_start(self, texts: Sequence[str]) -> list[list[int]]:
        return self.encode([text[: self.max_tokens + 1] for text in texts])

    def truncate(self, tokens: TokenIds, limit: int | None = None) -> list[int]:
        return list(tokens[: limit or self.max_tokens])

    def shorten(self, vectors: Vectors, dimensions: int) -> Vectors:
        return vectors[:, :dimensions]

    def embed(self, rows: Sequence[TokenIds]) -> Vectors:
        assert "dense" in self.outputs
        self._run(rows, {"dense"})
        return np.array([[len(row), row[0], 0, 1] for row in rows], dtype=np.float32)

    def embed_outputs(
        self, rows: Sequence[TokenIds], outputs: Collection[Output]
    ) -> list[TextOutputs]:
        assert set(outputs) <= set(self.outputs)
        if {*outputs} == {"dense"}:
            return [TextOutputs(dense=vector) for vector in self.embed(rows)]
        self._run(rows, outputs)
        return [
            TextOutputs(**{output: getattr(self, f"_{output}")(row) for output in outputs})
            for row in rows
        ]

    def _run(self, rows: Sequence[TokenIds], outputs: Collection[Output]) -> None:
        self.batches.append([len(row) for row in rows])
        self.passes.append(set(outputs))
        self.gate.pass_through()
        if self.poison and any(ord(self.poison) in row for row in rows):
            raise RuntimeError("poisoned")

    def _dense(self, row: TokenIds) -> Any:
        return np.array([len(row), row[0], 0, 1], np.float32)

    def _sparse(self, row: TokenIds) -> SparseVector:
        ids, counts = np.unique(np.array(row, np.int32), return_counts=True)
        return SparseVector(ids, (counts / 3).astype(np.float32))

    def _multi_vector(self, row: TokenIds) -> Vectors:
        return np.eye(self.token_dimensions, dtype=np.float32)[
            [token % self.token_dimensions for token in row]
        ]

    def in_steps(
        self, rows: Sequence[TokenIds], outputs: Collection[Output]
    ) -> Generator[list[TextOutputs] | None]:
        try:
            for step in range(self.steps):
                self.stepped.append(step)
                self.gate.pass_through()
                yield None
            yield self.embed_outputs(rows, outputs)
        finally:
            self.freed_on = threading.current_thread().name

    def probe(self) -> None:
        if "dense" in self.outputs:
            self.embed(self.encode(["Hello"]))
        else:
            self.embed_outputs(self.encode(["Hello"]), self.outputs[:1])

    def nbytes(self) -> int:
        return 1

    def close(self) -> None:
        self.is_closed = True


@dataclass
class ScriptedReranker:
    """A pair's tokens are a mark, the query's characters, a mark and the document's; its logits are
    how many of the query's characters the document has, after `others`.
    """

    max_tokens: int = 100
    gate: Gate = field(default_factory=Gate)
    batches: list[list[int]] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    others: tuple[float, ...] = ()
    poison: str | None = None
    unsure: str | None = None
    is_closed: bool = False
    token_s: float = 0.0

    def encode_pairs(
        self,
        query: str,
        documents: Sequence[str],
        *,
        max_document_tokens: int | None = None,
        instruction: str | None = None,
    ) -> list[Pair]:
        self.queries.append(query)
        room = self.max_tokens - 2 - len(query)
        if room < 1:
            raise ContextLengthExceeded(self.max_tokens, self.max_tokens - room + 1, noun="query")
        most = room if max_document_tokens is None else min(room, max_document_tokens)
        return [
            Pair(
                [0, *map(ord, query), 0, *map(ord, document[:most])],
                len(query) + 2,
                max(0, len(document) - most),
            )
            for document in documents
        ]

    def score(self, rows: Sequence[Pair]) -> Vectors:
        self.batches.append([len(row) for row in rows])
        self.gate.pass_through()
        if self.poison and any(ord(self.poison) in row.ids for row in rows):
            raise RuntimeError("poisoned")
        logits = []
        for row in rows:
            query, document = row.ids[1 : row.second - 1], row.ids[row.second :]
            logit = float(sum(token in document for token in query))
            is_unsure = self.unsure and ord(self.unsure) in document
            logits.append([*self.others, float("nan") if is_unsure else logit])
        return np.array(logits, dtype=np.float32)

    def in_steps(self, rows: Sequence[Pair]) -> Generator[Vectors | None]:
        yield self.score(rows)

    def probe(self) -> None:
        self.score(self.encode_pairs("Hello", ["Hello"]))

    def nbytes(self) -> int:
        return 1

    def close(self) -> None:
        self.is_closed = True


PASSED = Verdict(single=True, rows=True, prefixes=True, window=True)


@dataclass(frozen=True, slots=True)
class ScriptedGrammar:
    """A compiled grammar: its source, and its keywords that are not enforced."""

    grammar: Grammar
    unenforced: tuple[str, ...] = ()


@dataclass
class ScriptedRow:
    """A row of a scripted chat."""

    params: SequenceParams
    state: Literal["reading", "decoding", "parked", "preempted"] = "reading"
    rest: list[int] | None = None  # characters to say, once it is read; at a -1 it is cut
    said: int = 0
    is_held: bool = False  # parked once it is read
    echo: EchoedPrompt | None = None  # goes into its first delta

    def cap(self, max_tokens: int) -> bool:
        """Limit its answer; return True if it has said as much."""
        self.params = replace(self.params, max_tokens=max_tokens)
        if self.rest is not None:
            self.rest = [*self.rest[: max_tokens - self.said], -1]
        return self.rest is not None and self.said >= max_tokens

    def park(self) -> None:
        """Stop it, once it is read."""
        if self.state == "reading":
            self.is_held = True
        elif self.state == "decoding":
            self.state = "parked"

    def go_on(self) -> None:
        """Resume it."""
        self.is_held = False
        if self.state == "parked":
            self.state = "decoding"
        elif self.state == "preempted":
            self.state = "reading"

    def begin(self) -> None:
        """Go on from its prompt, or from where it was preempted."""
        if not self.said:
            self.echo = _echo(self.params)
        if self.rest is None:
            prompt, limit = list(self.params.prompt), self.params.max_tokens
            self.rest = prompt[:limit] + [-1] * (limit < len(prompt))
        self.state, self.is_held = "parked" if self.is_held else "decoding", False


@dataclass
class ScriptedChat:
    """Answers a conversation with its last message, or a prompt with itself, a character a step;
    or, if there is a `script`, with its deltas, one a step.
    """

    max_context: int = 100
    gate: Gate = field(default_factory=Gate)
    steps: list[int] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    fail_at_step: int | None = None
    is_closed: bool = False
    last_pass: Pass = field(default_factory=Pass)
    script: list[dict[str, Any]] = field(default_factory=list)
    jobs: list[GenerateJob] = field(default_factory=list)
    prefix_bytes: int = 0
    calls_are_text: bool = False
    thoughts_are_text: bool = False
    reads_whole: Callable[[str], Sequence[str]] | None = None  # texts of an answer's parts
    thinks: bool = True
    judged: list[tuple[str, str]] = field(default_factory=list)
    verdicts: list[bool | None] = field(default_factory=list)  # True after these
    kv_cost: KvCost = field(default_factory=KvCost)
    preempted: list[int] = field(default_factory=list)
    is_batched: bool = True
    is_listed: bool = True
    self_test_tokens: int = 0
    findings: list[Verdict] = field(default_factory=lambda: [PASSED])
    held: list[Verdict] = field(default_factory=list)
    faults: list[PassFault] = field(default_factory=list)
    params: dict[int, SequenceParams] = field(default_factory=dict)  # all that joined
    scripted: dict[int, ScriptedRow] = field(default_factory=dict)  # rows inside
    timed_s: Callable[[int], float] = lambda rows: 0.01 + 0.001 * rows  # seconds of a decode step

    images: ClassVar[ImageCost | None] = None  # None: it reads text alone

    prefixes = None

    @property
    def tokens(self) -> "ScriptedTokens":
        return ScriptedTokens()

    def prepare(self, job: GenerateJob) -> list[SequenceParams]:
        self.jobs.append(job)
        if job.images and self.images is None:
            image = job.images[0]
            raise ImageRefused(image.kind, image.place, image.place)
        noun = "messages" if job.prompt is None else "prompt"
        text = job.messages[-1]["content"] if job.prompt is None else _text(job.prompt)
        if text == "refuse me":
            raise BadRequest("The template refuses.", part="prompt")
        room = self.max_context - len(text)
        if room < (job.max_tokens != 0):
            raise ContextLengthExceeded(self.max_context, len(text), noun=noun)
        wanted = room if job.max_tokens is None else min(job.max_tokens, room)
        for question in job.questions:
            if (tokens := len(text) + len(question.text)) >= self.max_context:
                raise ContextLengthExceeded(
                    self.max_context, tokens, noun="questions", part="questions"
                )
        if job.questions:
            return [_judged_row(job, text, question, i) for i, question in enumerate(job.questions)]
        row = SequenceParams(
            prompt=[ord(c) for c in text],
            max_tokens=wanted,
            sampling=job.sampling,
            stop=job.stop,
            grammar=job.grammar,
            is_open=job.max_tokens is None,
            calls_are_text=self.calls_are_text and job.calling is not None,
            thoughts_are_text=self.thoughts_are_text and job.prompt is None,
            reads_whole=self.reads_whole is not None,
            logprobs=job.logprobs,
            thinking_budget=job.thinking_budget if self.thinks else None,
            is_thinking=self.thinks,
            echoed=list(text) if job.echo else None,
        )
        return [replace(row, index=i) for i in range(job.n)]

    def compile(self, grammar: Grammar) -> Compiled:
        if "bad" in grammar.source:
            raise BadRequest("The grammar is bad.", part="answer_form")
        if "many unenforced" in grammar.source:
            return ScriptedGrammar(grammar, tuple(f"#/{i}/{'x' * 99}" for i in range(20)))
        if "uniqueItems" in grammar.source:
            return ScriptedGrammar(grammar, ("#/uniqueItems", "#/a~1ü"))
        return ScriptedGrammar(grammar)

    def matches_schema(self, schema: str, answer: str) -> bool | None:
        self.judged.append((schema, answer))
        return self.verdicts.pop(0) if self.verdicts else True

    def read_answer(self, row: SequenceParams, text: str, is_cut: bool) -> Reading:
        assert self.reads_whole is not None
        return [Delta(row.index, part) for part in self.reads_whole(text)], None

    def self_test(self) -> Generator[Verdict]:
        yield from self.findings

    def time_step(self, rows: int) -> Generator[float | None]:
        yield None
        yield self.timed_s(rows)

    def apply_verdict(self, verdict: Verdict) -> None:
        self.held.append(verdict)
        is_forbidden = any(each.forbids_batches for each in self.held)
        self.is_batched = not is_forbidden and (verdict.is_whole or self.is_listed)

    @property
    def facts(self) -> EngineFacts:
        tokens = self.self_test_tokens
        return EngineFacts(self.max_context, self.kv_cost, tokens, images=self.images)

    def step(self, plan: StepPlan) -> StepResult:
        deltas = self._change(plan)
        self.last_pass = Pass()
        if plan.kind == "prefill" and self.inside("reading"):
            deltas += self.prefill(plan.token_budget)
        if plan.kind == "decode" and self.inside("decoding"):
            deltas += self.decode()
        faults: list[PassFault] = []
        if plan.kind is not None:
            faults, self.faults = self.faults, []
        reading, decoding = (self.inside(state) for state in ("reading", "decoding"))
        size, kept = self.last_pass, self.prefix_bytes
        return StepResult(deltas, size, faults, frozenset(reading), len(decoding), kept)

    def inside(self, state: str) -> dict[int, ScriptedRow]:
        """Return the rows in a state by their numbers."""
        return {number: row for number, row in self.scripted.items() if row.state == state}

    @property
    def rows(self) -> int:
        return len(self.inside("reading")) + len(self.inside("decoding"))

    def _change(self, plan: StepPlan) -> list[Delta]:
        deltas = []
        self.left += plan.leaving
        self.preempted += plan.preempting
        for number in plan.leaving:
            self.scripted.pop(number, None)
        for number in self.scripted.keys() & {*plan.preempting}:
            self.scripted[number].state, self.scripted[number].is_held = "preempted", False
        for number, limit in plan.capped:
            if number in self.scripted and self.scripted[number].cap(limit):
                deltas.append(self._end(number, "length"))
        if plan.clear_prefixes:
            self.prefix_bytes = 0
        if plan.prefix_limit is not None:
            self.prefix_bytes = min(self.prefix_bytes, plan.prefix_limit)
        for number, params in plan.joining:
            try:
                self.join(number, params)
            except Exception as error:
                deltas.append(Delta(params.index, id=number, error=str(error)))
        for number in self.scripted.keys() & {*plan.parking}:
            self.scripted[number].park()
        for number in self.scripted.keys() & {*plan.resuming}:
            self.scripted[number].go_on()
            if number in plan.parking:
                self.scripted[number].park()
        return deltas

    def join(self, number: int, params: SequenceParams) -> None:
        """Queue a row to be read."""
        self.joined.append(number)
        self.params[number] = params
        self.scripted[number] = ScriptedRow(params)

    def routing_keys(self, adapter: int = 0) -> list[bytes]:
        return []

    def drop_adapter(self, number: int) -> None:
        """Do nothing: no adapter takes anything."""

    def prefill(self, token_budget: int) -> list[Delta]:
        """Read all prompts, whatever the budget."""
        reading = self.inside("reading")
        lengths = [len(row.params.prompt) for row in reading.values()]
        self.last_pass = Pass(len(lengths), sum(lengths), len(lengths) * max(lengths))
        ended: list[Delta] = []
        if any(row.params.step is not None for row in reading.values()):
            self.gate.pass_through()
        for number, row in reading.items():
            if row.params.max_tokens == 0:
                ended.append(self._end(number, "length", prompt=_echo(row.params)))
            elif row.params.step is not None:
                ended.append(_judge(number, row.params, row.params.step))
                del self.scripted[number]
            else:
                row.begin()
        return ended

    def decode(self) -> list[Delta]:
        """Let each row say a character, or the next delta of the script."""
        self.gate.pass_through()
        decoding = self.inside("decoding")
        self.last_pass = Pass(len(decoding), len(decoding), len(decoding))
        self.steps.append(len(decoding))
        if self.fail_at_step == len(self.steps):
            raise RuntimeError("the step failed")
        deltas: list[Delta] = []
        for number, row in decoding.items():
            echo, row.echo = row.echo, None
            deltas.append(replace(self._next(number, row), prompt=echo))
        return deltas

    def synchronize(self) -> None: ...

    def _next(self, number: int, row: ScriptedRow) -> Delta:
        row.said += 1
        if self.script:
            if row.said == len(self.script):
                del self.scripted[number]
            return Delta(row.params.index, id=number, **self.script[row.said - 1])
        assert row.rest is not None
        if not row.rest or row.rest[0] == -1:
            return self._end(number, "length" if row.rest else "stop", tokens=1 - len(row.rest))
        return Delta(row.params.index, id=number, text=chr(row.rest.pop(0)), tokens=1)

    def _end(self, number: int, reason: FinishReason, **fields: Any) -> Delta:
        index = self.scripted.pop(number).params.index
        return Delta(index, id=number, finish_reason=reason, **fields)

    def probe(self) -> None:
        """Do nothing: there is no device to fail."""

    def nbytes(self) -> int:
        return 1

    def close(self) -> None:
        self.is_closed = True


class ScriptedTokens:
    """A token for every character, after a 1 if `special`; a 2 ends a conversation to answer."""

    tokenizer = SimpleNamespace(
        bos_token="<s>", eos_token="</s>", pad_token=None, chat_template="{{ messages }}"
    )

    def tokenize(self, job: GenerateJob, *, special: bool, asking: bool) -> list[int]:
        if job.prompt is not None:
            return [*([1] if special else []), *map(ord, _text(job.prompt))]
        return [*map(ord, job.messages[-1]["content"]), *([2] if asking else [])]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [chr(token) if token < 128 else "" for token in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def _text(prompt: str | TokenIds) -> str:
    return prompt if isinstance(prompt, str) else "".join(map(chr, prompt))


def _judged_row(job: GenerateJob, head: str, question: Question, index: int) -> SequenceParams:
    """One step a question, of one entry a label."""
    entries = [((ord(label[0]),), [i]) for i, label in enumerate(question.labels)]
    return SequenceParams(
        prompt=[ord(c) for c in head + question.text],
        max_tokens=1,
        sampling=job.sampling,
        index=index,
        step=LabelStep(question.number, entries, is_first=True),
    )


def _judge(row: int, job: SequenceParams, step: LabelStep) -> Delta:
    """The first label has a logprob of -1, the second of -2, …; a poisoned question fails."""
    if "poison" in _text(job.prompt):
        return Delta(job.index, id=row, error="poisoned")
    logprobs = [(label, -1.0 - label) for _, labels in step.entries for label in labels]
    return Delta(
        job.index,
        finish_reason="stop",
        cached_tokens=step.question,
        judgement=Judgement(step.question, logprobs),
        id=row,
    )


def _echo(job: SequenceParams) -> EchoedPrompt | None:
    """Give a prompt back, each character a token of logprob -1."""
    if job.echoed is None:
        return None
    scored = job.echoed[1:] if job.logprobs is not None else []
    likely = [Likelihood(text, text.encode(), -1.0) for text in scored]
    return EchoedPrompt(job.echoed, [TokenLogprob(each, [each]) for each in likely])


@dataclass
class ScriptedEngines:
    """Loads scripted engines, counting; a model in `failing` fails."""

    embedder: ScriptedEmbedder = field(default_factory=ScriptedEmbedder)
    chat: ScriptedChat = field(default_factory=ScriptedChat)
    reranker: ScriptedReranker = field(default_factory=ScriptedReranker)
    loads: list[str] = field(default_factory=list)
    imported: set[str] = field(default_factory=set)
    failing: dict[str, Exception] = field(default_factory=dict)
    unfetched: set[str] = field(default_factory=set)  # models whose files are on no disk
    reads: dict[str, Inputs | None] = field(default_factory=dict)  # known by files before a load
    load_gate: Gate = field(default_factory=Gate)
    sizes: dict[str, int] = field(default_factory=dict)
    device: str = "scripted"
    classify: Callable[[BaseException], Fault] = lambda _: Fault.UNKNOWN
    name: Callable[[Exception], Exception] = lambda error: error
    memory_bytes: int = 1 << 30
    buffer_bytes: int | None = None
    active_bytes: int = 12
    cached_bytes: int = 34
    tidied: int = 0

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def tidy(self) -> None:
        self.tidied += 1

    async def import_for(self, specs: Iterable[ModelSpec]) -> None:
        self.imported |= {spec.id for spec in specs}

    async def find(self, spec: ModelSpec) -> Path | None:
        return Path()

    async def files(self, spec: ModelSpec, *, is_pull: bool = False) -> Path:
        return Path()

    def tokenizer(self, spec: ChatSpec) -> Any:
        if spec.id in self.unfetched:
            raise ModelNotFound(spec.id)
        return self.chat.tokens.tokenizer

    async def offer(self, repo: str, is_pull: bool) -> Candidate:
        raise ModelUnavailable(repo, "no hub is scripted.")

    async def inputs(self, specs: Sequence[ModelSpec]) -> Mapping[str, Inputs | None]:
        kinds = ("text",) if self.chat.images is None else ("text", "image")
        return {spec.id: self.reads.get(spec.id, Inputs(None, kinds)) for spec in specs}

    async def size(self, spec: ModelSpec, folder: Path) -> Size:
        return Size(self.sizes.get(spec.id, 1))

    async def digest(self, spec: ChatSpec, folder: Path) -> str:
        return f"digest-of-{spec.id}"

    def fetched(self, spec: ModelSpec) -> Fetched:
        return Fetched(0)

    def embedding(
        self, spec: EmbeddingSpec, folder: Path
    ) -> Generator[EmbeddingEngine | None, None, None]:
        self._load(spec)
        yield None
        yield self.embedder

    def cross_encoder(
        self, spec: RerankSpec, folder: Path
    ) -> Generator[RerankEngine | None, None, None]:
        self._load(spec)
        yield None
        yield self.reranker

    async def generation(
        self, spec: ChatSpec, folder: Path
    ) -> Generator[GenerationEngine | None, None, None]:
        return self.writing(spec)

    def writing(self, spec: ChatSpec) -> Generator[GenerationEngine | None, None, None]:
        self._load(spec)
        yield None
        yield self.chat

    async def adapter(
        self, spec: ChatSpec, folder: Path, engine: GenerationEngine
    ) -> tuple[int, Generator[Adapter | None, None, None]]:
        return self.sizes.get(spec.id, 1), self.adapting(spec)

    def adapting(self, spec: ChatSpec) -> Generator[Adapter | None, None, None]:
        self._load(spec)
        yield None
        yield Adapter(len(self.loads), spec.id, self.sizes.get(spec.id, 1))

    def _load(self, spec: ModelSpec) -> None:
        self.loads.append(spec.id)
        self.load_gate.pass_through()
        if spec.id in self.failing:
            raise self.failing[spec.id]


def caller(deadline: float = FAR) -> Caller:
    return Caller(request_id=f"req-{next(_requests)}", deadline=deadline, allowed_s=600)


def embed_job(*texts: str, deadline: float = FAR, truncate: bool = False) -> EmbedJob:
    return EmbedJob(caller=caller(deadline), texts=texts, truncate=truncate)


def rerank_job(query: str, *documents: str, deadline: float = FAR, **options: Any) -> RerankJob:
    return RerankJob(caller=caller(deadline), query=query, documents=documents, **options)


def generate_job(
    text: str, *, n: int = 1, max_tokens: int | None = None, deadline: float = FAR
) -> GenerateJob:
    return GenerateJob(
        caller=caller(deadline),
        messages=[{"role": "user", "content": text}],
        sampling=Sampling(temperature=0),
        n=n,
        max_tokens=max_tokens,
    )
