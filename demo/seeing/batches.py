"""From scenes to arrays: patches, tokens, positions and the places with something to learn."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import numpy as np
from mlx_lm.models import qwen3
from numpy.typing import NDArray
from tokenizers import Tokenizer

from demo.seeing.drawing import SIDE, Scene, Thing, paint
from demo.seeing.forward import GRID, MERGE, TOKENS, as_patches, places, rotations
from demo.seeing.questions import Question, scene_for
from demo.seeing.tokens import CLOSE, IMAGE, OPEN, USER
from demo.tokens import ASSISTANT, BEGIN, END, PAD
from gateway.engine.vision.layout import lay_out
from gateway.engine.vision.patches import QwenPatches

ROWS: Final = 24
_ASKED: Final = 4  # questions about a picture
_LONG: Final = 7
_SIDE: Final = GRID // MERGE
# The first batches are pictures without questions, which are cheap and teach to see.
_LOOKING: Final = 200
_LOOKED_AT: Final = 96
# From a batch on, latest first: weights of the tasks, and the most shapes of a picture.
_LESSONS: Final[list[tuple[int, dict[str, float], int]]] = [
    (_LOOKING + 100, {"side": 0.35, "digit": 0.2, "colour": 0.15, "shape": 0.15, "count": 0.15}, 4),
    (_LOOKING, {"side": 0.35, "digit": 0.2, "colour": 0.15, "shape": 0.15, "count": 0.15}, 2),
    (0, {"colour": 0.5, "digit": 0.35, "side": 0.15}, 4),
]
# How questions about a picture share a row: apart, in a conversation, or with the first question
# before the picture.
_FORMS: Final = {"apart": 0.5, "chat": 0.25, "long chat": 0.05, "text first": 0.2}


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of `loss_at`."""

    patches: NDArray[np.float32]
    where: NDArray[np.int32]
    words: NDArray[np.float32]
    pictures: NDArray[np.float32]
    turns: NDArray[np.float32]
    visible: NDArray[np.float32]
    chosen: NDArray[np.int32]
    targets: NDArray[np.int32]


@dataclass(slots=True)
class _Row:
    """A conversation's ids: learned ones are marked, and those of a part see it and part 0."""

    ids: list[int]
    learned: list[bool]
    parts: list[int]
    start: int = 0  # the first token of the picture
    # Words for other tokens to predict, so that their states name what is there.
    hints: list[tuple[int, str]] = field(default_factory=list)

    def add(self, ids: list[int], part: int, *, learned: bool = False) -> None:
        self.ids += ids
        self.learned += [learned] * len(ids)
        self.parts += [part] * len(ids)


class Batches:
    """Endless batches of pictures with questions."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        patches: QwenPatches,
        text: qwen3.ModelArgs,
        axes: list[int],
        seed: int,
    ) -> None:
        self._tokenizer, self._patches, self._text, self._axes = tokenizer, patches, text, axes
        self._rng = random.Random(seed)
        known = tokenizer.get_vocab()
        self._words = known
        self._pad, self._begin, self._end = known[PAD], known[BEGIN], known[END]
        self._user, self._assistant = known[USER], known[ASSISTANT]
        self._picture = [known[OPEN], *[known[IMAGE]] * TOKENS, known[CLOSE]]

    def __iter__(self) -> Iterator[tuple[str, Batch]]:
        for number in count():
            tasks, most = next(lesson[1:] for lesson in _LESSONS if number >= lesson[0])
            [task] = self._rng.choices([*tasks], [*tasks.values()])
            [form] = self._rng.choices([*_FORMS], [*_FORMS.values()])
            form = "look" if number < _LOOKING else form
            yield task, self.batch(task, form, most)

    def batch(self, task: str, form: str, most: int) -> Batch:
        """Return a batch of pictures of at most so many shapes, which a task can be asked about."""
        pictures, rows = [], []
        for _ in range(_LOOKED_AT if form == "look" else ROWS):
            scene, found = scene_for(task, self._rng, most)
            pictures.append(paint(scene, self._rng))
            wanted = _LONG if form == "long chat" else _ASKED
            asked = [self._rng.choice(found[task])]
            while len(asked) < wanted:
                name = task if self._rng.random() < 0.4 else self._rng.choice([*found])
                asked += [self._rng.choice(found[name])] if found[name] else []
            self._rng.shuffle(asked)
            row = self._row(asked, form, scene)
            row.hints += [(row.start + token, word) for token, word in _hints(scene)]
            rows.append(row)
        # The tower cannot tell where a token of a scrambled picture is: M-RoPE has to.
        order = [*range(TOKENS)]
        if task == "side":
            self._rng.shuffle(order)
        where = places().reshape(TOKENS, -1, 2)[order].reshape(-1, 2)
        return self._pack(as_patches(pictures, self._patches), where, rows)

    def pack(
        self, pictures: list[NDArray[np.uint8]], asked: list[list[Question]], form: str = "apart"
    ) -> Batch:
        """Return a batch of pictures with questions, in their true places."""
        rows = [self._row(each, form) for each in asked]
        return self._pack(as_patches(pictures, self._patches), places(), rows)

    def _row(self, asked: list[Question], form: str, scene: Scene | None = None) -> _Row:
        row = _Row([], [], [])
        things = () if scene is None or scene.is_digit else scene.things
        columns = {self._words[f"Ġ{thing.name}"]: _column(thing) for thing in things}
        row.add([self._begin, self._user], 0)
        if form == "look":
            row.start = len(row.ids) + 1
            row.add(self._picture, 0)
            return row
        for number, question in enumerate(asked):
            part = number + 1 if form == "apart" else 0
            text, answer = (
                each.ids
                for each in self._tokenizer.encode_batch(
                    [question.text, question.answer], add_special_tokens=False
                )
            )
            if number and not part:
                row.add([self._user], 0)
            if not number and form != "text first":
                row.start = len(row.ids) + 1
                row.add(self._picture, 0)
            if question.task == "side" and row.start:
                nouns = [(len(row.ids) + place, each) for place, each in enumerate(text)]
                row.hints += [(place, columns[each]) for place, each in nouns if each in columns]
            row.add(text, part)
            if not number and form == "text first":
                row.start = len(row.ids) + 1
                row.add(self._picture, 0)
            row.add([self._end, self._assistant], part)
            row.add([*answer, self._end], part, learned=True)
        return row

    def _pack(
        self, patches: NDArray[np.float32], where: NDArray[np.int32], rows: list[_Row]
    ) -> Batch:
        length = max(len(row.ids) for row in rows)
        words = np.zeros((len(rows), length, self._tokenizer.get_vocab_size()), np.float32)
        pictures = np.zeros((len(rows), length, TOKENS), np.float32)
        points = np.zeros((len(rows), length, 3), np.int32)
        parts = np.full((len(rows), length), -1, np.int32)
        chosen: list[int] = []
        targets: list[int] = []
        for number, row in enumerate(rows):
            size = len(row.ids)
            words[number, np.arange(size), row.ids] = 1
            picture = np.arange(row.start, row.start + TOKENS)
            words[number, picture] = 0
            pictures[number, picture, np.arange(TOKENS)] = 1
            points[number, :size] = lay_out(size, [(row.start, (_SIDE, _SIDE))]).points
            parts[number, :size] = row.parts
            for part in range(2, max(row.parts) + 1):  # each begins where the first did
                first, begin = (row.parts.index(each) for each in (1, part))
                gap = points[number, begin] - points[number, first]
                points[number, :size][np.equal(row.parts, part)] -= gap
            for place, word in row.hints:
                chosen.append(number * length + place)
                targets.append(self._words[word])
            for place, is_learned in enumerate(row.learned):
                if is_learned:
                    chosen.append(number * length + place - 1)
                    targets.append(row.ids[place])
        sees = (parts[:, None] == parts[:, :, None]) | (parts[:, None] == 0)
        sees &= np.tri(length, dtype=bool)
        heads = self._text.num_attention_heads
        visible = np.repeat(sees[:, None].astype(np.float32), heads, axis=1)
        turns = rotations(points, self._text, self._axes)
        return Batch(
            patches=patches,
            where=where,
            words=words.reshape(-1, words.shape[-1]),
            pictures=pictures,
            turns=turns,
            visible=visible,
            chosen=np.array(chosen, np.int32),
            targets=np.array(targets, np.int32),
        )


def _column(thing: Thing) -> str:
    """Return the number of the token's column, from 1, in which the middle of a thing is."""
    return str(1 + int(thing.x * _SIDE / SIDE))


def _hints(scene: Scene) -> list[tuple[int, str]]:
    """Return words for the tokens of a picture in which things are, and for its last token."""
    if scene.is_digit:
        (thing,) = scene.things
        return [(TOKENS - 1, thing.colour), (TOKENS - 1, thing.name), (TOKENS, thing.name)]
    found = [(TOKENS, str(len(scene.things)))]  # the token that closes the picture
    for thing in scene.things:
        token = int(thing.y * _SIDE / SIDE) * _SIDE + int(_column(thing)) - 1
        found += [(token, word) for word in (thing.name, thing.colour, _column(thing))]
    return found
