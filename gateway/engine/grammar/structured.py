"""Compiles the grammars of one model, masks its logits, and checks finished answers."""

import json
from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np

from gateway.engine import sandbox_worker
from gateway.engine.grammar.calls import CallFormat, answer_grammar
from gateway.engine.grammar.compiling import (
    CompiledGrammar,
    GrammarBounds,
    compile_grammar,
    key_of,
)
from gateway.engine.grammar.matching import BoundRow, Masks, apply_masks
from gateway.engine.grammar.schema_bounds import Shape
from gateway.engine.grammar.schemas import draft_of
from gateway.engine.grammar.tokenizer import GrammarTokenizer
from gateway.engine.sandbox_worker import Sandbox
from gateway.errors import BadRequest
from gateway.jobs.chat import GenerateJob, Grammar

_MAX_BYTES: Final = 1 << 29  # bytes of memory in the sandbox


def fits(source: str, answer: str, sandbox: Sandbox | None) -> bool | None:
    """Return whether an answer fits a JSON Schema, `source`, or None if the check failed."""
    try:
        json.loads(answer)
    except (ValueError, RecursionError):
        return False  # the answer may have been cut off
    request: dict[str, Any] = {
        "kind": "answer",
        "schema": source,
        "answer": answer,
        "draft": f"Draft{draft_of(json.loads(source)).name[1:]}Validator",
        "max_bytes": _MAX_BYTES,
    }
    if sandbox is None:
        outcome, value = sandbox_worker.judge(request)
    else:
        outcome, value = sandbox(request, key_of("answer", source))
    return bool(value) if outcome == "judged" else None


class StructuredOutput:
    """Compiles one model's grammars, and masks its logits.

    `problem` says why the model has no grammar `tokenizer`, so that every grammar is refused.
    """

    def __init__(
        self,
        tokenizer: GrammarTokenizer | None,
        shape: Shape,
        call_format: CallFormat | None,
        sandbox: Sandbox | None = None,
        *,
        problem: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._problem = problem
        self._sandbox = sandbox
        self._shape = shape
        self._bounds = GrammarBounds()
        self._call_format = call_format
        self._masks = Masks()

    def grammar(self, job: GenerateJob) -> Grammar | None:
        """Return the grammar of a job's answer, or None. Raises BadRequest."""
        return answer_grammar(job.calling, self._call_format, job.grammar)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar, slowly, on any thread. Raises BadRequest if that fails."""
        if self._tokenizer is None:
            raise BadRequest(
                "This model's answers cannot follow a schema, a grammar or a required tool: "
                f"its tokenizer cannot be used with grammars: {self._problem}",
                part="answer_form",
                code="grammar_not_supported",
            )
        return compile_grammar(
            self._tokenizer,
            grammar,
            shape=self._shape,
            bounds=self._bounds,
            sandbox=self._sandbox,
        )

    def matches_schema(self, schema: str, answer: str) -> bool | None:
        return fits(schema, answer, self._sandbox)

    def mask(self, logits: mx.array, bound: Sequence[BoundRow]) -> mx.array:
        """Return (rows, vocabulary) logits with -inf for the tokens that grammars exclude."""
        assert self._tokenizer is not None
        forced = [row.forced(1) for row in bound]
        bitmask = np.zeros((len(bound), self._tokenizer.words), dtype=np.uint32)
        self._masks.fill([row.matcher for row in bound], bitmask)
        for mask, row, tokens in zip(bitmask, bound, forced, strict=True):
            # Decoding must choose the same token that a pass over forced tokens reads.
            if tokens:
                mask[:] = 0
                mask[tokens[0] // 32] = np.uint32(1 << (tokens[0] % 32))
            if row.opening is not None:
                mask[row.opening // 32] |= np.uint32(1 << (row.opening % 32))
            if row.barred:
                unbarred = mask.copy()
                for token in (each for each in row.barred if each < 32 * len(mask)):
                    unbarred[token // 32] &= ~np.uint32(1 << (token % 32))
                if unbarred.any():  # a grammar that allows only barred tokens wins
                    mask[:] = unbarred
        return apply_masks(logits, bitmask, [row.place for row in bound])
