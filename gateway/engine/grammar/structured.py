"""What one model can be held to: its grammars, its calls, and the masks of a step."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from gateway.engine.grammar.calls import CallFormat, answer_grammar
from gateway.engine.grammar.compiling import (
    Bounds,
    CompiledGrammar,
    GrammarTokenizer,
    compile_grammar,
    read_schema,
)
from gateway.engine.grammar.indexes import Runner, compile_index
from gateway.engine.grammar.matching import Masks, apply_masks
from gateway.engine.grammar.shaping import Shape, shaped
from gateway.engine.rows import Row
from gateway.errors import BadRequest
from gateway.jobs import GenerateJob, Grammar


class Structured:
    """A model's grammar tokenizer, and how far schemas are tightened for it.

    `run` calls a command in a process that a deadline ends: outlines_core needs it, having no
    bound of its own.
    """

    def __init__(
        self,
        tokenizer: GrammarTokenizer,
        shape: Shape,
        call_format: CallFormat | None,
        run: Runner | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._run = run
        self._shape = shape
        self._bounds = Bounds()
        self._call_format = call_format
        self._masks = Masks()

    def grammar(self, job: GenerateJob) -> Grammar | None:
        """Give what the answer must match, of calls and of a form; None when it is free.

        Raises BadRequest for a function whose parameters are no schema.
        """
        return answer_grammar(job.calling, self._call_format, job.grammar, self._checked)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile; slow, and safe on any thread. Raises BadRequest saying what is wrong."""
        if self._run is None or grammar.kind == "calls":  # calls are Lark: llguidance's alone
            return compile_grammar(self._tokenizer, grammar, shape=self._shape, bounds=self._bounds)
        return compile_index(
            self._tokenizer, grammar, self._run, shape=self._shape, bounds=self._bounds
        )

    def masked(self, logits: mx.array, rows: Sequence[Row], bound: Sequence[int]) -> mx.array:
        """Forbid, in logits, (rows, vocabulary), what the grammars of the `bound` rows exclude."""
        matchers = [matcher for i in bound if (matcher := rows[i].matcher) is not None]
        bitmask = np.zeros((len(bound), self._tokenizer.words), dtype=np.uint32)
        self._masks.fill(matchers, bitmask)
        for mask, i in zip(bitmask, bound, strict=True):
            if (token := rows[i].may_open_with) is not None:
                mask[token // 32] |= np.uint32(1 << (token % 32))
        return apply_masks(logits, bitmask, bound)

    def _checked(self, schema: Mapping[str, Any], function: str) -> dict[str, Any]:
        """Check a function's schema, or the answer's where there is none, and tighten it."""
        try:
            read = read_schema(json.dumps(dict(schema)), self._bounds)
        except BadRequest as error:
            if not function:
                raise
            message = f"The parameters of '{function}': {error.message}"
            raise BadRequest(message, param="tools", code=error.code) from None
        tight = shaped(read, self._shape)
        return tight if isinstance(tight, dict) else {}
