"""The logprobs of a prompt's tokens, computed while the prompt is read."""

import math
from collections import abc
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from gateway.engine.answers.output_parts import TokenScores
from gateway.engine.generation.sampling import LOWEST_LOGPROB, score
from gateway.engine.generation.sequence import Sequence

# The most bytes of float32 logits in one pass: 110 tokens with a vocabulary of 151,936.
MOST_BYTES = 64 << 20


def max_scored_tokens(vocab_size: int) -> int:
    """Return the most tokens, with padding, that may be scored in one pass."""
    return max(1, MOST_BYTES // (4 * vocab_size))


class Scorer:
    """A model that also computes prompt logprobs, if called with all tokens of the prompts."""

    def __init__(self, model: Callable[..., mx.array], seqs: abc.Sequence[Sequence]) -> None:
        self._model = model
        self._rows = seqs
        self._at = 0
        for seq in seqs:
            seq.prompt_logprobs.clear()

    def __call__(self, tokens: mx.array, **options: Any) -> mx.array:
        """Run the model on tokens, (rows, n); shorter rows are padded on the right."""
        logits = self._model(tokens, **options)
        width = tokens.shape[1]
        places: list[int] = []
        targets: list[tuple[Sequence, int]] = []  # each place's sequence, and the token to score
        for i, seq in enumerate(self._rows):
            following = seq.params.prompt[self._at + 1 : self._at + 1 + width]
            places += range(i * width, i * width + len(following))
            targets += [(seq, token) for token in following]
        if places:
            self._store_scores(logits.reshape(-1, logits.shape[-1])[mx.array(places)], targets)
        self._at += width
        return logits

    def _store_scores(self, logits: mx.array, targets: list[tuple[Sequence, int]]) -> None:
        tokens = mx.array([token for _, token in targets])
        top = max(seq.params.logprobs or 0 for seq in self._rows)
        scores = score(logits, tokens, range(len(targets)), top)
        chosen: Any = scores.chosen.tolist()
        ids: Any = scores.ids.tolist()
        logprobs: Any = scores.logprobs.tolist()
        for place, (seq, token) in enumerate(targets):
            logprob = chosen[place]
            if logprob == -math.inf:
                logprob = LOWEST_LOGPROB
            alternatives = seq.params.logprobs or 0
            seq.add_prompt_score(
                token, TokenScores(logprob, ids[place], logprobs[place], alternatives)
            )
