"""Echoed prompts: the texts of their tokens, and their logprobs, taken as they are read."""

import math
from collections import abc
from collections.abc import Callable, Collection
from typing import Any

import mlx.core as mx

from gateway.engine.answers.detokenizer import Detokenizer, Vocabulary
from gateway.engine.generation.sampling import score
from gateway.engine.generation.sequence import Sequence, TokenScores

# Of logits at once, as float32: 110 tokens at a vocabulary of 151,936. A whole prompt of 4,096
# would take 2.5 GB.
MOST_BYTES = 64 << 20
LEAST = -9999.0  # what vLLM writes for -inf, which JSON has no word for


def max_scored_tokens(vocab_size: int) -> int:
    """Return how many tokens may be scored in one pass, padding included."""
    return max(1, MOST_BYTES // (4 * vocab_size))


def texts_of(
    ids: abc.Sequence[int], text: str | None, vocabulary: Vocabulary, special: Collection[int]
) -> list[str]:
    """Return the text of each token of a prompt; together they are the prompt's.

    Half a character goes with the token that completes it. A special token is shown if the prompt,
    `text`, contains it: the tokenizer may have added others.
    """
    decoder, texts, at = Detokenizer(vocabulary), [], 0
    for token in ids:
        is_added = False
        if token in special and text is not None:
            is_added = not text.startswith(vocabulary.tokenizer.id_to_token(token) or "", at)
        piece = "" if is_added else decoder.push(token)
        texts.append(piece)
        at += len(piece)
    return texts


class Scorer:
    """A model that also scores the prompts of some sequences as it reads them together, from their
    beginning. It is called as the model is.
    """

    def __init__(self, model: Callable[..., mx.array], rows: abc.Sequence[Sequence]) -> None:
        self._model = model
        self._rows = rows
        self._at = 0
        for row in rows:
            row.prompt_logprobs.clear()

    def __call__(self, tokens: mx.array, **more: Any) -> mx.array:
        """Read tokens, (rows, n), padded on the right for shorter rows."""
        logits = self._model(tokens, **more)
        width = tokens.shape[1]
        follows = [row.job.prompt[self._at + 1 : self._at + 1 + width] for row in self._rows]
        places = [i * width + j for i, each in enumerate(follows) for j in range(len(each))]
        if places:
            flat = logits.reshape(-1, logits.shape[-1])[mx.array(places)]
            wanted = [row.job.logprobs or 0 for row in self._rows]
            targets = [token for each in follows for token in each]
            self._store_scores(flat, targets, [len(each) for each in follows], wanted)
        self._at += width
        return logits

    def _store_scores(
        self,
        logits: mx.array,
        targets: list[int],
        counts: abc.Sequence[int],
        wanted: abc.Sequence[int],
    ) -> None:
        """Append the scores to the sequences, `counts` tokens each, in order."""
        scores = score(logits, mx.array(targets), range(len(targets)), max(wanted))
        chosen: Any = scores.chosen.tolist()
        ids: Any = scores.ids.tolist()
        logprobs: Any = scores.logprobs.tolist()
        at = 0
        for row, count, most in zip(self._rows, counts, wanted, strict=True):
            for place in range(at, at + count):
                scored = TokenScores(_finite(chosen[place]), ids[place], logprobs[place], most)
                row.add_prompt_score(targets[place], scored)
            at += count


def _finite(logprob: float) -> float:
    return LEAST if logprob == -math.inf else logprob
