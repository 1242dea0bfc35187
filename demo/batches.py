"""From conversations to arrays: tokens, positions, and the places with something to learn."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from demo.data import conversations
from demo.tokens import ASSISTANT, BEGIN, CONTEXT, END, PAD, Template

_POOL = 4096
_LONGEST = 640
_GAP_ODDS = 0.25
_LONGEST_GAP = 6000


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of like length: tokens and positions (rows, length), places and targets (n)."""

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    places: NDArray[np.int32]
    targets: NDArray[np.int32]


def learned(ids: list[int], assistant: int, end: int) -> list[bool]:
    """Mark the tokens to learn: what an assistant says, with the end of its turn."""
    marks, speaking = [], False
    for token in ids:
        marks.append(speaking)
        if token == assistant:
            speaking = True
        elif token == end:
            speaking = False
    return marks


def spread(rng: random.Random, ids: list[int], turns: set[int]) -> list[int]:
    """Positions of the tokens; sometimes a turn begins far from the last, as in a long chat."""
    starts = [i for i, token in enumerate(ids) if token in turns]
    if not starts or rng.random() > _GAP_ODDS:
        return list(range(len(ids)))
    start = rng.choice(starts)
    gap = int(math.exp(rng.uniform(math.log(8), math.log(_LONGEST_GAP))))
    assert len(ids) + gap < CONTEXT
    return [i if i < start else i + gap for i in range(len(ids))]


class Batches:
    """Endless length-bucketed batches of about `budget` padded tokens each."""

    def __init__(self, tokenizer: Tokenizer, budget: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._budget = budget
        self._rng = random.Random(seed)
        self._cases = conversations(seed)
        self._template = Template()
        known = tokenizer.get_vocab()
        self._pad, self._assistant, self._end = known[PAD], known[ASSISTANT], known[END]
        self._turns = {i for t, i in known.items() if t.startswith("<|")} - {
            known[BEGIN], known[END], known[PAD],
        }  # fmt: skip

    def __iter__(self) -> Iterator[Batch]:
        while True:
            groups = list(self._groups())
            self._rng.shuffle(groups)
            yield from map(self._pack, groups)

    def _groups(self) -> Iterator[list[list[int]]]:
        """Cut the next pool of conversations, sorted by length, into batches."""
        texts = [self._template.render(c.messages, c.tools) for c in islice(self._cases, _POOL)]
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        rows = sorted((e.ids for e in encoded if len(e.ids) <= _LONGEST), key=len)
        group: list[list[int]] = []
        for row in rows:
            if (len(group) + 1) * len(row) > self._budget:
                yield group
                group = []
            group.append(row)
        yield group

    def _pack(self, rows: list[list[int]]) -> Batch:
        length = max(map(len, rows)) - 1
        tokens = np.full((len(rows), length), self._pad, np.int32)
        positions = np.zeros((len(rows), length), np.int32)
        places: list[int] = []
        targets: list[int] = []
        for number, ids in enumerate(rows):
            tokens[number, : len(ids) - 1] = ids[:-1]
            positions[number, : len(ids) - 1] = spread(self._rng, ids, self._turns)[:-1]
            for i, mark in enumerate(learned(ids, self._assistant, self._end)):
                if mark:
                    places.append(number * length + i - 1)
                    targets.append(ids[i])
        as_array = (np.array(x, np.int32) for x in (places, targets))
        return Batch(tokens, positions, *as_array)
