"""Drafts of which the first token is right and no other, whatever a drafter guesses."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from gateway.engine.drafts.head_drafter import HeadDrafter

Check = Callable[[list[int], Sequence[int]], None]  # takes a context and the guesses after it


def let_drafts_be_half_right(
    monkeypatch: pytest.MonkeyPatch, kind: type[HeadDrafter], model: Any, check: Check
) -> set[int]:
    """Replace all drafts of a kind, each after a check of what it was; return the set to which the
    contexts' lengths are added.
    """
    draft, lengths = kind.draft, set[int]()

    def half_right(self: Any, seqs: Any, rooms: Any) -> dict[int, Sequence[int]]:
        drafts = draft(self, seqs, rooms)
        for number, tokens in drafts.items():
            context = list(seqs[number].context)
            lengths.add(len(context))
            check(context, tokens)
            logits = model(mx.array([context]), cache=make_prompt_cache(model))
            right = int(logits[0, -1].argmax().item())
            drafts[number] = [right, *[1] * len(tokens)][: len(tokens)]
        return drafts

    monkeypatch.setattr(kind, "draft", half_right)
    return lengths


def assert_likeliest(logits: mx.array, token: int, rounding: float = 1e-3) -> None:
    distance: float = np.array(logits).max() - logits[token].item()
    assert distance < rounding
