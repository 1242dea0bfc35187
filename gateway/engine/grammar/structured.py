"""What one model can be held to: its grammars, its calls, and the masks of a step.

It also checks whether a finished answer fits a schema that its grammar could not hold whole.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx
import numpy as np

from gateway.engine import sandboxed
from gateway.engine.grammar.calls import CallFormat, answer_grammar, of_function
from gateway.engine.grammar.compiling import (
    Bounds,
    CompiledGrammar,
    compile_grammar,
    read_schema,
)
from gateway.engine.grammar.matching import BoundRow, Masks, apply_masks
from gateway.engine.grammar.schemas import Draft, draft_of
from gateway.engine.grammar.shaping import Shape, shape_schema
from gateway.engine.grammar.tokenizer import GrammarTokenizer
from gateway.engine.grammar.trial import Sandbox, key_of
from gateway.engine.grammar.unenforced import check_strict, hold
from gateway.errors import BadRequest
from gateway.jobs import GenerateJob, Grammar

_MAX_BYTES: Final = 1 << 29
_VALIDATORS: Final = {
    Draft.D4: "Draft4Validator",
    Draft.D6: "Draft6Validator",
    Draft.D7: "Draft7Validator",
    Draft.D2019: "Draft201909Validator",
    Draft.D2020: "Draft202012Validator",
}


def fits(source: str, answer: str, sandbox: Sandbox | None) -> bool | None:
    """Return whether an answer fits a schema, both JSON; None if that cannot be decided.

    Runs in the sandbox, if there is one: a caller's schema may take any time.
    """
    try:
        json.loads(answer)
    except (ValueError, RecursionError):
        return False  # cut off, say
    request: dict[str, Any] = {
        "kind": "answer",
        "schema": source,
        "answer": answer,
        "draft": _VALIDATORS[draft_of(json.loads(source))],
        "max_bytes": _MAX_BYTES,
    }
    if sandbox is None:
        outcome, value = sandboxed.judge(request)
    else:
        outcome, value = sandbox(request, key_of("answer", source))
    return bool(value) if outcome == "judged" else None


class Structured:
    """A model's grammar tokenizer, and how far schemas are tightened for it.

    Without a tokenizer every grammar is refused, naming the `problem` with the model's. Grammars
    are compiled in the `sandbox` first, if there is one.
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
        self._bounds = Bounds()
        self._call_format = call_format
        self._masks = Masks()

    def grammar(self, job: GenerateJob) -> Grammar | None:
        """Return what the answer must match, made from calls and a form; None if it is free.

        Raises BadRequest for a function whose parameters are no schema.
        """
        unenforced: list[str] = []

        def checked(schema: Mapping[str, Any], function: str, *, strict: bool) -> dict[str, Any]:
            return self._checked(schema, function, strict=strict, unenforced=unenforced)

        grammar = answer_grammar(job.calling, self._call_format, job.grammar, checked)
        if grammar is None or not unenforced:
            return grammar
        return replace(grammar, unenforced=tuple(unenforced))

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar. Slow, safe on any thread. Raises BadRequest saying what is wrong."""
        if self._tokenizer is None:
            raise BadRequest(
                "This model's answers cannot be held to a schema, a grammar or a required tool: "
                f"its tokenizer cannot serve grammars: {self._problem}",
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
        """Return whether a finished answer fits a JSON Schema; None if undecidable. Slow."""
        return fits(schema, answer, self._sandbox)

    def mask(self, logits: mx.array, bound: Sequence[BoundRow]) -> mx.array:
        """Forbid, in logits, (rows, vocabulary), what the grammars of the bound rows exclude.

        Where only one text can follow, that is every token but the next of those that the tokenizer
        makes of it: a token that is read ahead is the one that would have been chosen.
        """
        assert self._tokenizer is not None  # or there were no matchers
        forced = [row.forced(1) for row in bound]
        bitmask = np.zeros((len(bound), self._tokenizer.words), dtype=np.uint32)
        self._masks.fill([row.matcher for row in bound], bitmask)
        for mask, row, tokens in zip(bitmask, bound, forced, strict=True):
            if tokens:
                mask[:] = 0
                mask[tokens[0] // 32] = np.uint32(1 << (tokens[0] % 32))
            if (token := row.opening) is not None:
                mask[token // 32] |= np.uint32(1 << (token % 32))
            if row.barred:
                others = mask.copy()
                for token in row.barred:
                    others[token // 32] &= ~np.uint32(1 << (token % 32))
                if others.any():  # a grammar that must end wins over min_tokens
                    mask[:] = others
        return apply_masks(logits, bitmask, [row.place for row in bound])

    def _checked(
        self, schema: Mapping[str, Any], function: str, *, strict: bool, unenforced: list[str]
    ) -> dict[str, Any]:
        """Check a function's schema, or the answer's if there is no function, and tighten it.

        Keywords that are not enforced are added to the list, behind the function's name.
        """
        try:
            held = hold(read_schema(json.dumps(dict(schema)), self._bounds), self._bounds.max_path)
            if strict:
                check_strict(held.unenforced)
        except BadRequest as error:
            raise of_function(function, error) from None
        unenforced += [f"{function}{pointer}" for pointer in held.unenforced]
        return dict(shape_schema(held.schema, self._shape))
