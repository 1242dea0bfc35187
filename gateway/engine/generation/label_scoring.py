"""Questions answered with the probabilities of their labels: nothing is sampled.

The labels of a question form a tree of tokens. Each node with children is a step: a sequence whose
prompt ends with the node's tokens, and which returns the logprobs of the children. A label's
logprob is the sum over its steps. If a label begins another label, the end of the answer counts as
one more child.
"""

import math
from collections import abc
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from typing import Any, overload

import mlx.core as mx

from gateway.engine.control_tokens import Piece
from gateway.engine.device import evaluate
from gateway.engine.generation.sampling import LOWEST_LOGPROB
from gateway.engine.generation.sequence import Sequence
from gateway.engine.prompting.chat_tokenizer import ChatTokenizer
from gateway.errors import BadRequest, ContextLengthExceeded
from gateway.jobs import TokenIds
from gateway.jobs.chat import Delta, GenerateJob, Judgement, Question
from gateway.jobs.steps import LabelStep, SequenceParams

MAX_STEPS = 4096


@dataclass(slots=True)
class _Node:
    labels: list[int] = field(default_factory=list)  # labels that begin with the node's tokens
    ends: list[int] = field(default_factory=list)  # labels that are exactly the node's tokens
    next: dict[int, "_Node"] = field(default_factory=dict)  # children, by token


def prepare_questions(
    job: GenerateJob, chat: ChatTokenizer, max_context: int, vocab_size: int
) -> list[SequenceParams]:
    """Return the parameters of one sequence per step. Safe on any thread.

    Raises BadRequest for empty, equal or too many labels, and ContextLengthExceeded.
    """
    head, rests, opening = encode_questions(job, chat)
    texts = [label for question in job.questions for label in question.labels]
    labels = iter(encode_labels(texts, opening, chat))
    steps: list[SequenceParams] = []
    for question, rest in zip(job.questions, rests, strict=True):
        ids = [next(labels) for _ in question.labels]
        for label, depth, step in _steps(question, ids, chat.answers.eos_ids, vocab_size):
            prompt = StepPrompt(head, rest, label, depth)
            if len(prompt) >= max_context:
                raise _too_long(max_context, len(prompt), is_question=len(rest) > len(head))
            if len(steps) == MAX_STEPS:
                raise BadRequest(
                    f"The labels of these questions have more than {MAX_STEPS} tokens to read.",
                    part="questions",
                )
            steps.append(
                SequenceParams(
                    prompt=prompt,
                    max_tokens=1,
                    sampling=job.sampling,
                    index=len(steps),
                    step=step,
                    adapter=job.adapter,
                    cache_salt=job.caller.cache_salt,
                )
            )
    return steps


@dataclass(frozen=True, slots=True, eq=False)
class StepPrompt(abc.Sequence[int]):
    """The prompt of a step. Steps share the lists: 4,096 copies of a long prompt take 256 MB."""

    head: TokenIds  # the beginning of all questions' prompts
    rest: TokenIds  # the remainder of one question's prompt
    label: TokenIds
    depth: int  # the number of the label's tokens in this prompt

    def __len__(self) -> int:
        return len(self.head) + len(self.rest) + self.depth

    def __iter__(self) -> abc.Iterator[int]:
        return chain(self.head, self.rest, islice(self.label, self.depth))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return list(self)[index]


def _too_long(limit: int, tokens: int, *, is_question: bool) -> ContextLengthExceeded:
    if is_question:
        return ContextLengthExceeded(limit, tokens, noun="questions", part="questions")
    return ContextLengthExceeded(limit, tokens, noun="input")


def encode_questions(
    job: GenerateJob, chat: ChatTokenizer
) -> tuple[list[int], list[list[int]], str]:
    """Return the ids that all prompts share, each prompt's other ids, and the text before answers.

    Callers' texts can't become control tokens.
    """
    before, after = chat.render_questions(job)
    text = job.messages[-1]["content"]
    questions = [question.text for question in job.questions]

    def encode(start: abc.Sequence[Piece], texts: abc.Sequence[str]) -> list[list[int]]:
        return chat.controls.encode([[*start, (text, True), (after, False)] for text in texts])

    [whole] = encode(before, [text + questions[0]])
    # GPT-2's tokenizer joins a line break to the text after it, Qwen's to the text before it.
    for start in dict.fromkeys((text, text.rstrip("\n"))):
        [first] = chat.controls.encode([[*before, (start, True)]])
        rests = encode((), [text[len(start) :] + question for question in questions])
        if first + rests[0] == whole:
            return first, rests, after
    [first] = chat.controls.encode([[*before, (text, True)]])
    wholes = encode(before, [text + question for question in questions])
    alike = takewhile(lambda ids: len(set(ids)) == 1, zip(first, *wholes, strict=False))
    shared = sum(1 for _ in alike)
    return whole[:shared], [ids[shared:] for ids in wholes], after


def encode_labels(labels: abc.Sequence[str], opening: str, chat: ChatTokenizer) -> list[list[int]]:
    """Return the token ids of labels that follow the text `opening`.

    Labels can't become control tokens.
    """
    encoded = chat.controls.encode([[(label, True)] for label in labels])
    if not opening.endswith("\n"):
        return encoded
    # Some tokenizers encode a text differently after a line break.
    [line] = chat.controls.encode([[("\n", False)]])
    after_line = chat.controls.encode([[("\n", False), (label, True)] for label in labels])
    for i, ids in enumerate(after_line):
        if ids[: len(line)] == line:
            encoded[i] = ids[len(line) :]
    return encoded


def _steps(
    question: Question,
    labels: abc.Sequence[TokenIds],
    eos_ids: abc.Collection[int],
    vocab_size: int,
) -> abc.Iterator[tuple[TokenIds, int, LabelStep]]:
    """Yield (label, depth, step): the step's prompt ends with `depth` tokens of the label."""
    root = _Node()
    for label, ids in enumerate(labels):
        if not ids or not all(0 <= token < vocab_size for token in ids):
            raise BadRequest("A label has no tokens of this model.", part="questions")
        node = root
        node.labels.append(label)
        for token in ids:
            node = node.next.setdefault(token, _Node())
            node.labels.append(label)
        node.ends.append(label)
        if len(node.ends) > 1:
            raise BadRequest(
                f"Two labels of question {question.number} have the same tokens in this model.",
                part="questions",
            )
    nodes = [(0, root)]
    for depth, node in nodes:
        if not node.next:
            continue
        entries: list[tuple[TokenIds, abc.Sequence[int]]] = [
            ((token,), child.labels) for token, child in node.next.items()
        ]
        if node.ends:
            ends = sorted(token for token in eos_ids if token < vocab_size)
            entries.append((ends, node.ends))
        yield labels[node.labels[0]], depth, LabelStep(question.number, entries, is_first=not depth)
        nodes += [(depth + 1, child) for child in node.next.values()]


def score_labels(seqs: abc.Sequence[Sequence], logits: mx.array) -> list[Delta]:
    """Return each sequence's only delta, from the logits after its prompt, (rows, vocabulary)."""
    logits = logits.astype(mx.float32)
    rows_of: list[int] = []
    tokens_of: list[int] = []
    for i, seq in enumerate(seqs):
        for tokens, _ in _step_of(seq).entries:
            rows_of += [i] * len(tokens)
            tokens_of += tokens
    asked, sums = logits[mx.array(rows_of), mx.array(tokens_of)], mx.logsumexp(logits, axis=-1)
    evaluate(asked, sums)
    read: Any = asked.tolist()
    totals: Any = sums.tolist()
    values = iter(read)
    deltas = []
    for seq, total in zip(seqs, totals, strict=True):
        step = _step_of(seq)
        logprobs = [[next(values) - total for _ in tokens] for tokens, _ in step.entries]
        deltas.append(_to_delta(seq, step, logprobs))
    return deltas


def _to_delta(seq: Sequence, step: LabelStep, logprobs: abc.Sequence[abc.Sequence[float]]) -> Delta:
    if any(map(math.isnan, chain.from_iterable(logprobs))):
        return seq.error_delta("its output is not a number")
    by_label = [
        (label, max(LOWEST_LOGPROB, _add(entry_logprobs)))
        for (_, labels), entry_logprobs in zip(step.entries, logprobs, strict=True)
        for label in labels
    ]
    return Delta(
        seq.index,
        finish_reason="stop",
        cached_tokens=seq.cached_tokens,
        judgement=Judgement(step.question, by_label),
        id=seq.id,
    )


def _add(logprobs: abc.Sequence[float]) -> float:
    """Return the log of the sum of probabilities that are given as logprobs; -inf for none."""
    greatest = max(logprobs, default=-math.inf)
    if greatest == -math.inf:
        return greatest
    return greatest + math.log(math.fsum(math.exp(logprob - greatest) for logprob in logprobs))


def _step_of(seq: Sequence) -> LabelStep:
    assert seq.params.step is not None
    return seq.params.step
