"""How models mark their thinking, and whether a sequence is thinking, judged by its tokens.

Sources: vllm/reasoning/*.py and the chat templates of the model families.
"""

import re
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gateway.engine.answers.harmony import HARMONY_TOKENS
from gateway.engine.answers.output_parts import AnswerParser
from gateway.engine.answers.stop_strings import held_back
from gateway.registry.names import REASONING_PARSERS, canonical_names


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Marks that open and close thinking, and the models that write them."""

    name: str
    models: str  # the models in words, for docs/tools.md
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()  # further marks, which are dropped
    written: tuple[str, ...] = ()  # words in templates, if other formats have the same marks

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.starts, *self.ends, *self.noise)


# Thinking is on channels, not between marks (harmony.py).
HARMONY = ReasoningFormat("openai_gptoss", "gpt-oss and Muse: in channels", noise=HARMONY_TOKENS)
_THINK = (("<think>",), ("</think>",))
# The search takes the first row that matches.
_ROWS = (
    HARMONY,
    # MiniMax M3 may begin an answer with an end mark, which is dropped.
    ReasoningFormat(
        "minimax_m3", "MiniMax M3", ("<mm:think>",), ("</mm:think>",), ("</mm:think>",)),
    ReasoningFormat(
        "granite_response", "Granite 3.3, with its answer in `<response>`", *_THINK,
        ("<response>", "</response>"), ("<response></response>",),
    ),
    ReasoningFormat(
        "hunyuan_a13b", "Hunyuan A13B, with its answer in `<answer>`", *_THINK,
        ("<answer>", "</answer>"), ("<answer>", "</answer>"),
    ),
    ReasoningFormat("qwen3", "Qwen 3, DeepSeek, GLM and most others", *_THINK),
    ReasoningFormat("longcat", "LongCat", ("<longcat_think>",), ("</longcat_think>",)),
    ReasoningFormat(
        "think_tokens", "others, with these marks", ("<|think:start|>",), ("<|think:end|>",)
    ),
    ReasoningFormat("mistral", "Magistral, Ministral", ("[THINK]",), ("[/THINK]",)),
    ReasoningFormat("seed_oss", "Seed-OSS", ("<seed:think>",), ("</seed:think>",)),
    ReasoningFormat(
        "cohere_command3", "Command A", ("<|START_THINKING|>",), ("<|END_THINKING|>",),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ReasoningFormat("gemma4", "Gemma 4", ("<|channel>thought",), ("<channel|>",)),
    ReasoningFormat(
        "kimi_k3", "Kimi K3", ("<|open|>think<|sep|>",), ("<|close|>think<|sep|>",),
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    ReasoningFormat("apertus", "Apertus", ("<|inner_prefix|>",), ("<|inner_suffix|>",)),
    ReasoningFormat("exaone_deep", "EXAONE Deep", ("<thought>",), ("</thought>",)),
    # Quantized models write "Here's".
    ReasoningFormat(
        "granite", "Granite 3.2",
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    ReasoningFormat("none", "thoughts, if any, are text"),
)  # fmt: skip
REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {form.name: form for form in _ROWS}
)
_NAMES = canonical_names(REASONING_PARSERS)


def reasoning_format(name: str) -> ReasoningFormat:
    """Return the format of this name, canonical or not. Raises KeyError."""
    return REASONING_FORMATS[_NAMES[name]]


def infer_reasoning(vocabulary: Container[str], template: str, model_type: str) -> str:
    """Return the name of a model's format, found by the model's tokens or else template."""
    has_channels = "to=self<|message|>" in template or all(t in vocabulary for t in HARMONY_TOKENS)
    if has_channels or model_type in ("gpt_oss", "muse_spark", "muse_glimmer"):
        return HARMONY.name
    forms = [form for form in _ROWS if form.starts and all(w in template for w in form.written)]
    for form in forms:
        if all(_has_tokens(mark, vocabulary) for mark in (*form.starts, *form.ends)):
            return form.name
    written = (form.name for form in forms if any(start in template for start in form.starts))
    return next(written, "none")


def _has_tokens(mark: str, vocabulary: Container[str]) -> bool:
    tokens = re.findall(r"<[^<>]*>|\[[^\[\]]*\]", mark)
    return bool(tokens) and all(token in vocabulary for token in tokens)


_TAIL = 256  # characters kept at the end of an answer, more than the longest mark has


class ThinkingBudget:
    """Forces the end of a sequence's thinking after `limit` tokens.

    `ends` are the marks that end a thought, and `tail` is the end of the prompt.
    """

    def __init__(
        self,
        limit: int,
        parser: AnswerParser,
        spell: Callable[[int], str],
        encode: Callable[[str], Sequence[int]],
        ends: Sequence[str],
        *,
        opens: frozenset[int] = frozenset(),
        opens_after: str = "",
        tail: str = "",
    ) -> None:
        self._left = limit
        # The answer's parser cannot be shared, because it lags behind while a step is launched.
        self._parser = parser
        self._spell = spell
        self._encode = encode
        self._ends = ends
        self._opens = opens  # tokens that open a thought after `opens_after`
        self._opens_after = opens_after
        self._tail = tail
        self._has_thought = parser.is_in_thought
        self._has_answered = not parser.is_thinking
        self._forced: list[int] = []
        self._force()

    @property
    def forced(self) -> int | None:
        return self._forced[0] if self._forced else None

    @property
    def barred(self) -> frozenset[int]:
        """Return the tokens that would open another thought after the budget is used up."""
        if self._left or not self._has_thought or self._parser.is_in_thought:
            return frozenset()
        return self._opens if self._tail.endswith(self._opens_after) else frozenset()

    def room(self, limit: int) -> int:
        """Return how many tokens after the next token are surely free, at most `limit`."""
        if self.barred and not self._opens_after:
            return limit
        return max(0, min(limit, self._left - 1))

    def take(self, token: int) -> None:
        if self._parser.is_in_thought:
            self._left = max(0, self._left - 1)
        text = self._spell(token)
        self._parser.push(text)
        self._tail = (self._tail + text)[-_TAIL:]
        self._has_thought = self._has_thought or self._parser.is_in_thought
        self._has_answered = self._has_answered or not self._parser.is_thinking
        self._forced = self._forced[1:] if token == self.forced else []
        self._force()

    def _force(self) -> None:
        """Force an end mark, or the rest of a begun mark, once the budget is used up."""
        if self._left or self._forced:
            return
        begun = {end: held_back(self._tail, (end,)) for end in self._ends}
        end = max(begun, key=begun.__getitem__)
        # Between two messages, only a begun mark is completed, so that no header is broken.
        is_between = self._parser.is_thinking and not self._has_answered and begun[end] > 0
        if not (self._parser.is_in_thought or is_between):
            return
        rest = end[begun[end] :]
        ids = list(self._encode(rest))
        # Some tokenizers put a space before the text that they encode, so the whole mark is forced.
        if "".join(map(self._spell, ids)) != rest:
            ids = list(self._encode(end))
        self._forced = ids


class Thinking:
    """Tracks whether a sequence is thinking, because its grammar applies only afterwards."""

    def __init__(
        self,
        spell: Callable[[int], str],
        ends: re.Pattern[str] | None,
        *,
        is_on: bool,
        opens_with: int | None = None,
        closes_with: int | None = None,
        stops: Collection[int] = (),
        budget: ThinkingBudget | None = None,
    ) -> None:
        self.is_on = is_on
        self.budget = budget
        self.stops = sorted(stops)
        self.opens_with = opens_with  # begins thinking if it is the answer's first token
        self.closes_with = closes_with  # ends thinking
        self._spell = spell
        self._ends = ends
        self._tail = ""

    def take(self, token: int) -> bool:
        """Take the next token, and return True if the grammar does not apply to it."""
        was_on = self.is_on
        if self.budget is not None:
            self.budget.take(token)
        if token == self.opens_with:
            self.is_on = True
        elif was_on and self._ends is not None:
            self._tail = (self._tail + self._spell(token))[-_TAIL:]
            self.is_on = self._ends.search(self._tail) is None
        self.opens_with = None
        return was_on or self.is_on
