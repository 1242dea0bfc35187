"""Makes the parsers of a model's answers."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from gateway.engine.answers.call_bodies import read_arguments
from gateway.engine.answers.call_values import Call, read_all
from gateway.engine.answers.detokenizer import Detokenizer, Vocabulary
from gateway.engine.answers.harmony import STOPS, HarmonyParser, answer_begins, thought_end
from gateway.engine.answers.output_parts import (
    AnswerParser,
    CallWriter,
    Marks,
    Mode,
    OutputProcessor,
    WholeParser,
    spell_out,
)
from gateway.engine.answers.parsing import Markup, Parser
from gateway.engine.answers.reasoning import HARMONY, ReasoningFormat, Thinking, ThinkingBudget
from gateway.engine.answers.stop_strings import StopScanner
from gateway.engine.answers.tool_formats import NO_TOOLS, ToolFormat
from gateway.engine.grammar.calls import CallFormat
from gateway.jobs.steps import SequenceParams


class AnswerFormat:
    """A model's formats for calls and reasoning. Threads may share it."""

    def __init__(
        self,
        tools: ToolFormat,
        reasoning: ReasoningFormat,
        backend: Tokenizer,
        vocabulary: Vocabulary,
        eos_ids: Collection[int],
    ) -> None:
        self.tools = tools
        self.reasoning = reasoning
        self.is_harmony = reasoning is HARMONY
        self._backend = backend
        self._vocabulary = vocabulary
        words = [*reasoning.marks, *tools.words]
        self.marks = Marks(backend.get_added_tokens_decoder(), words)
        self.eos_ids = frozenset(eos_ids)
        if self.is_harmony:  # <|end|> and <|eom|> end a message, not the answer
            self.eos_ids = (self.eos_ids | self.ids(STOPS)) - self.ids(("<|end|>", "<|eom|>"))

    @property
    def reads_calls(self) -> bool:
        return self.tools is not NO_TOOLS

    @property
    def call_ids(self) -> frozenset[int]:
        """Return the ids of the marks around calls, or none if no grammar describes the format."""
        if not self.tools.is_json:
            return frozenset()
        return self.ids(mark for pair in self.tools.marks for mark in pair)

    def call_format(self, is_special: Callable[[int], bool]) -> CallFormat | None:
        """Return the model's call format for a grammar, or None if no grammar describes it."""
        if self.tools.is_separate:
            return CallFormat("", "", is_special=True, closing_is_special=True, is_separate=True)
        if not self.tools.is_json:
            return None
        start, end = self.tools.marks[0]
        ids = [self._backend.token_to_id(mark) for mark in (start, end)]
        return CallFormat(start, end, *(i is not None and is_special(i) for i in ids))

    def output_processor(self, params: SequenceParams) -> OutputProcessor:
        return OutputProcessor(
            Detokenizer(self._vocabulary, continues=params.is_bare or params.is_continued),
            self.parser(params),
            StopScanner(params.stop),
            self._vocabulary,
            self.marks,
        )

    def parser(self, params: SequenceParams) -> AnswerParser:
        tools, calling, is_bound = self.tools, params.calling, params.grammar is not None
        functions: dict[str, Mapping[str, Any]] = {}
        mode: Mode = "none"
        if calling is not None:
            functions = {function.name: function.parameters for function in calling.functions}
            if calling.forced:
                mode = "forced"
            elif self.reads_calls:
                mode = "either" if params.is_either else "free"
        calls = self.call_writer(params)
        if params.reads_whole:
            return WholeParser("none", calls)
        if params.is_bare:
            return Parser(Markup(), mode, is_thinking=False, is_bound=is_bound, calls=calls)
        if self.is_harmony:
            # Muse Glimmer writes `f.f` for a function `f`. A function named `f.f` comes later, and
            # replaces this entry.
            own = {each: n for n in sorted(functions, key=len) for each in (f"{n}.{n}", n)}
            known = {written: functions[name] for written, name in own.items()}

            def read_message(name: str, text: str) -> Sequence[Call]:
                if not tools.marks:
                    return [read_arguments(own.get(name, name), text)]
                calls = read_all(tools.read, text, known)
                return [{**call, "name": own.get(call["name"], call["name"])} for call in calls]

            return HarmonyParser(
                mode,
                functions=known,
                read=read_message,
                calls=calls,
                is_bound=is_bound,
                is_begun=params.is_continued,
                opening=self.marks.pattern(params.opening),
            )
        pattern, reasoning = self.marks.pattern, self.reasoning
        markup = Markup(
            opens=tuple(map(pattern, reasoning.starts)),
            closes=tuple(map(pattern, reasoning.ends)),
            calls=tuple(pattern(start) for start, _ in tools.marks),
            call_ends=tuple({pattern(end) for _, end in tools.marks if end}),
            words=("", *map(pattern, tools.words_of_calls)),
            noise=tuple(map(pattern, (*reasoning.noise, *tools.noise))),
            around=tuple(map(pattern, tools.noise)),
            bare=tools.begins(list(functions)),
            read=lambda text, at, ending: tools.read(text, at, functions, ending),
        )
        return Parser(
            markup,
            mode,
            is_thinking=params.is_thinking,
            is_bound=is_bound,
            is_begun=params.is_continued,
            calls=calls,
        )

    def call_writer(self, params: SequenceParams) -> CallWriter:
        calling = params.calling
        is_single = calling is not None and not (calling.forced or calling.parallel)
        limit = 1 if is_single else math.inf
        return CallWriter(self.tools.new_id, params.earlier_calls, limit=limit)

    def thinking(self, params: SequenceParams) -> Thinking:
        spell, pattern = self._spell, self.marks.pattern
        if self.is_harmony:
            stops = self.eos_ids
            if params.calling is not None and not params.calling.forced:
                stops -= self.ids(("<|call|>",))  # a call inside a thought may end the answer
            return Thinking(
                spell,
                answer_begins(pattern),
                is_on=params.is_thinking,
                closes_with=self._backend.token_to_id("<|end|>"),
                stops=stops,
                budget=self._budget(params),
            )
        if not self.reasoning.ends:
            return Thinking(spell, None, is_on=params.is_thinking, stops=self.eos_ids)
        opens_with = None
        if params.may_think:
            opens_with = min(self.ids(self.reasoning.starts), default=None)
        return Thinking(
            spell,
            re.compile("|".join(re.escape(pattern(mark)) for mark in self.reasoning.ends)),
            is_on=params.is_thinking,
            opens_with=opens_with,
            closes_with=self._backend.token_to_id(self.reasoning.ends[0]),
            stops=self.eos_ids,
            budget=self._budget(params),
        )

    @property
    def ends_thoughts(self) -> bool:
        """Return True if the tokenizer can encode a mark that ends the model's thinking."""
        ends = self._thought_ends(may_call=False)
        return any(end in "".join(map(self._spell, self._unspell(end))) for end in ends)

    def ids(self, tokens: Iterable[str]) -> frozenset[int]:
        ids = (self._backend.token_to_id(token) for token in tokens if token)
        return frozenset(token for token in ids if token is not None)

    def _thought_ends(self, *, may_call: bool) -> list[str]:
        ends: Sequence[str] = self.reasoning.ends
        if self.is_harmony:
            ends = [thought_end(is_spark=bool(self.ids(("<|eom|>",))), may_call=may_call)]
        return [self.marks.pattern(end) for end in ends]

    def _budget(self, params: SequenceParams) -> ThinkingBudget | None:
        if params.thinking_budget is None:
            return None
        may_call = params.calling is not None and not params.calling.forced
        opens, opens_after, tail = self.ids(self.reasoning.starts), "", ""
        if self.is_harmony:
            opens, opens_after = frozenset(self._unspell("analysis")[:1]), "<|channel|>"
            [tail] = self._thought_ends(may_call=True)  # the usual end of a prompt
            tail = self.marks.pattern(params.opening) or tail
        return ThinkingBudget(
            params.thinking_budget,
            self.parser(params),
            self._spell,
            self._unspell,
            self._thought_ends(may_call=may_call),
            opens=opens,
            opens_after=self.marks.pattern(opens_after),
            tail=tail,
        )

    def _unspell(self, text: str) -> list[int]:
        """Return the ids of a text with spelled tokens (output_parts.py)."""
        return list(self._backend.encode(spell_out(text), add_special_tokens=False).ids)

    def _spell(self, token: int) -> str:
        return self.marks.spelled(token) or self._vocabulary.text(token)
