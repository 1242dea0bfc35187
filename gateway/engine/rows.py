"""One answer in the making: what it has read, said and may still say."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gateway.engine.grammar.compiling import CompiledGrammar
from gateway.engine.grammar.matching import Matcher
from gateway.engine.parsing import Parser, Part
from gateway.engine.sampling import Sampler
from gateway.engine.text import Decoder, StopScanner
from gateway.engine.vocabulary import Vocabulary
from gateway.jobs import FinishReason, Likelihood, RowDelta, RowJob, TokenLogprob


@dataclass(slots=True)
class Speech:
    """How a row's tokens become parts: decoded, told apart, stopped."""

    decoder: Decoder
    parser: Parser
    stops: StopScanner
    vocabulary: Vocabulary
    _parsed: int = 0
    _told: int = 0
    _unplaced: list[tuple[int, TokenLogprob]] = field(default_factory=list)

    def hear(
        self, token: int, scores: "TokenScores | None", *, is_shown_as_text: bool
    ) -> list[Part]:
        """Give the parts that the token makes certain."""
        piece = self.decoder.push(token)
        if scores is not None and not self.parser.is_thinking:
            # The texts of the tokens make the content; only an answer of one token, whose text
            # may be nothing, shows it nevertheless: rerankers read it.
            shown = piece if is_shown_as_text else piece or self.vocabulary.text(token)
            self._unplaced.append((self._parsed, scores.told(self.vocabulary, token, shown)))
        return [self._stopped(part) for part in self.parser.push(piece)]

    def finish(self) -> list[Part]:
        """Give what was held back, once no more comes."""
        parts = [self._stopped(part) for part in self.parser.flush()]
        rest = self.stops.flush()
        self._told += len(rest)
        return [*parts, Part(text=rest)]

    def placed(self, *, is_last: bool) -> Sequence[TokenLogprob]:
        """Give the logprobs of tokens whose text is out; those of a stop string never come."""
        every = is_last and not self.stops.is_stopped
        placed = [(start, each) for start, each in self._unplaced if every or start < self._told]
        self._unplaced = self._unplaced[len(placed) :]
        if not self.stops.is_stopped:
            return [each for _, each in placed]
        # A stop string may begin inside a token: what is shown of it is what was told.
        return [_cut(each, self._told - start) for start, each in placed]

    def _stopped(self, part: Part) -> Part:
        if not part.text:
            return part
        self._parsed += len(part.text)
        text = self.stops.push(part.text)
        self._told += len(text)
        return Part(text=text)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The logprobs of one token and of the likeliest beside it, off the device."""

    chosen: float
    ids: Sequence[int]
    logprobs: Sequence[float]
    wanted: int

    def told(self, vocabulary: Vocabulary, token: int, piece: str) -> TokenLogprob:
        """Give them with texts; what a grammar excludes is left out."""
        ranked = sorted(zip(self.logprobs, self.ids, strict=True), reverse=True)[: self.wanted]
        top = [
            Likelihood(vocabulary.text(i), vocabulary.bytes(i), logprob)
            for logprob, i in ranked
            if logprob > -math.inf
        ]
        return TokenLogprob(Likelihood(piece, vocabulary.bytes(token), self.chosen), top)


def _cut(logprob: TokenLogprob, length: int) -> TokenLogprob:
    chosen = logprob.chosen
    return replace(logprob, chosen=replace(chosen, token=chosen.token[:length]))


class Row:
    """A `RowJob` inside the engine. Its tokens are told one at a time, in order."""

    def __init__(
        self,
        row_id: int,
        job: RowJob,
        sampler: Sampler,
        speech: Speech,
        eos_ids: frozenset[int],
        think: tuple[tuple[int, ...], tuple[int, ...]],
    ) -> None:
        self.id = row_id
        self.job = job
        self.sampler = sampler
        self.tokens: list[int] = []
        self.cached_tokens = 0  # of the prompt: taken from what others had read
        self.is_suspect = False
        self.was_suspect = False
        self.is_broken = False
        self._speech = speech
        self._eos_ids = eos_ids
        self._think_start, self._think_end = think
        assert job.compiled is None or isinstance(job.compiled, CompiledGrammar)
        self._grammar = job.compiled
        self._matcher = self._grammar.matcher() if self._grammar is not None else None
        self._is_free = job.is_thinking  # of its grammar, while it thinks
        self._matched = 0

    @property
    def context(self) -> list[int]:
        """Give all that the model must have read before the next token."""
        return [*self.job.prompt, *self.tokens]

    @property
    def is_at_last(self) -> bool:
        """Tell whether the next token is the last one allowed."""
        return len(self.tokens) + 1 >= self.job.max_tokens

    @property
    def matcher(self) -> Matcher | None:
        """Give what the next token must match, if anything."""
        return None if self._is_free else self._matcher

    @property
    def may_open_with(self) -> int | None:
        """Give the token that opens a block of thinking, where one may still come first."""
        may = self.job.may_think and not self.tokens and len(self._think_start) == 1
        return self._think_start[0] if may else None

    @property
    def is_over(self) -> bool:
        """Tell whether the text met a stop string, or the one call it may make, or broke."""
        one_call = self.job.calling is not None and not self.job.calling.parallel
        parser = self._speech.parser
        said_its_call = one_call and parser.mode == "free" and parser.calls > 0
        broke = self.is_broken or (self._matcher is not None and self._matcher.error is not None)
        return self._speech.stops.is_stopped or said_its_call or broke

    def curtail(self, max_tokens: int) -> None:
        """Let it say no more than so many tokens."""
        self.job = replace(self.job, max_tokens=min(max_tokens, self.job.max_tokens))

    def suspect(self) -> None:
        """Prepare to be read again, alone, after a step that went wrong."""
        self.is_suspect = self.was_suspect = True
        self.cached_tokens = 0
        self.sampler.recount(self.tokens)
        if self._grammar is not None:
            matched = self.tokens[len(self.tokens) - self._matched :]
            self._matcher = self._grammar.matcher(matched)

    def say(self, token: int) -> FinishReason | None:
        """Take the next token; tell whether, without looking at the text, it is the last."""
        self._is_free = self._is_free or token == self.may_open_with
        self.tokens.append(token)
        if token in self._eos_ids:
            return "stop"
        if (matcher := self.matcher) is not None:
            matcher.consume(token)
            self._matched += 1
            if matcher.is_over:
                return "stop"
        elif self._is_free and self._think_end:
            self._is_free = tuple(self.tokens[-len(self._think_end) :]) != self._think_end
        return "length" if len(self.tokens) >= self.job.max_tokens else None

    def told(self, ended: FinishReason | None, scores: TokenScores | None) -> list[RowDelta]:
        """Give what the token just said makes certain; the last delta says why it is the last."""
        if self._matcher is not None and self._matcher.error is not None:
            return [RowDelta(self.id, error=f"its grammar broke: {self._matcher.error}")]
        token = self.tokens[-1]
        parts: list[Part] = []
        was_thinking = self._speech.parser.is_thinking
        if token not in self._eos_ids or (scores is not None and len(self.tokens) == 1):
            # An answer of one token shows it, whatever it is: rerankers read its logprobs.
            is_only = ended is not None and len(self.tokens) == 1
            parts = self._speech.hear(token, scores, is_shown_as_text=not is_only)
        if self.is_over:
            ended = "stop"
        if ended is not None:
            parts += self._speech.finish()
        if ended == "stop" and self._speech.parser.calls:
            ended = "tool_calls"
        return self._deltas(parts, ended, reasoned=was_thinking)

    def _deltas(
        self, parts: Sequence[Part], ended: FinishReason | None, *, reasoned: bool
    ) -> list[RowDelta]:
        placed = self._speech.placed(is_last=ended is not None)
        deltas = [
            RowDelta(self.id, part.text, reasoning=part.reasoning, call=part.call)
            for part in parts
            if part.text or part.reasoning or part.call
        ]
        # The token, its logprobs and the end go with the last of its parts.
        last = deltas.pop() if deltas else RowDelta(self.id)
        deltas.append(
            RowDelta(
                self.id,
                last.text,
                1,
                ended,
                reasoning=last.reasoning,
                call=last.call,
                logprobs=placed,
                reasoning_tokens=int(reasoned),
            )
        )
        if len(self.tokens) == 1:
            deltas[0] = replace(deltas[0], cached_tokens=self.cached_tokens)
        return deltas
