"""The choice of the next tokens of a batch, from the logits of its pass."""

from collections import abc
from typing import Any

import mlx.core as mx

from gateway.engine.device import launch
from gateway.engine.generation.decode_batch import DecodeBatch, Doubt
from gateway.engine.generation.sampling import (
    Scores,
    adjust_logits,
    bar_tokens,
    choose,
    is_finite,
    keep_open,
    score,
)
from gateway.engine.generation.sequence import Sequence
from gateway.engine.grammar.structured import Structured


def choose_tokens(
    structured: Structured,
    rows: list[Sequence],
    cache: list[Any],
    logits: mx.array,
    drafts: abc.Sequence[abc.Sequence[int]] = (),
) -> DecodeBatch:
    """Launch the choice of the next tokens. Their masks are made while the pass runs.

    `logits`, (tokens, vocabulary), are those of each row's next token, followed by those after each
    token of its draft, if there are `drafts`, one a row.
    """
    drafts = drafts or [()] * len(rows)
    ahead = [i for draft in drafts for i in range(len(draft) + 1)]
    each = [row for row, draft in zip(rows, drafts, strict=True) for _ in range(len(draft) + 1)]
    finite = is_finite(logits)
    logits = constrain(structured, each, logits)
    tokens, scores, doubts = _draw(each, ahead, logits)
    launch(tokens, finite, [(each.chosen, each.ids, each.logprobs) for each, _ in scores])
    launch([doubt.is_sure for doubt in doubts])
    return DecodeBatch(rows, cache, tokens, finite, scores, doubts, list(drafts))


def constrain(structured: Structured, rows: list[Sequence], logits: mx.array) -> mx.array:
    """Return logits, (rows, vocabulary), with each row's bias and penalties, and with -inf for what
    may not be its next token.
    """
    logits = adjust_logits([row.sampler for row in rows], logits)
    for i, row in enumerate(rows):
        if (thinking := row.thinking_first) is not None:
            logits = keep_open(logits, i, thinking)
    if kept_up := [(i, row.barred) for i, row in enumerate(rows) if row.matcher is None]:
        logits = bar_tokens(logits, kept_up)
    if bound := [it for i, row in enumerate(rows) if (it := row.bound(i)) is not None]:
        logits = structured.mask(logits, bound)
    return logits


def redraw_unsure(running: DecodeBatch) -> bool:
    """Draw again where the window was too small; return whether any was."""
    has_mended = False
    while running.doubts:
        running.evaluate()
        doubt = running.doubts.pop()
        is_sure: Any = doubt.is_sure.tolist()
        wrong = [
            i
            for i, row in enumerate(doubt.rows)
            if not is_sure[i] and any(row is each for each in running.rows)
        ]
        if wrong:
            rows = [doubt.rows[i] for i in wrong]
            for row in rows:
                row.sampler.widen()
            running.replace(rows, *_draw(rows, [0] * len(rows), doubt.logits[mx.array(wrong)]))
            has_mended = True
    return has_mended


def _draw(
    rows: list[Sequence], ahead: list[int], logits: mx.array
) -> tuple[mx.array, list[tuple[Scores, list[Sequence | None]]], list[Doubt]]:
    """Choose from logits, (rows, vocabulary), that are adjusted and masked.

    `ahead` says how many tokens after the row's next one each is.
    """
    positions = [len(row.tokens) + i for row, i in zip(rows, ahead, strict=True)]
    choice = choose([row.sampler for row in rows], logits, positions)
    scores: list[tuple[Scores, list[Sequence | None]]] = []
    if wanted := [i for i, row in enumerate(rows) if row.job.logprobs is not None]:
        k = max(rows[i].job.logprobs or 0 for i in wanted)
        some = score(logits, choice.tokens, wanted, k)
        scores.append((some, [rows[i] for i in wanted]))
    if choice.is_sure is None:
        return choice.tokens, scores, []
    return choice.tokens, scores, [Doubt(rows, logits, choice.is_sure)]
