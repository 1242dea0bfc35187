"""One answer being written: its tokens, its text, its grammar and its end."""

import math
from collections import abc
from dataclasses import dataclass, field, replace

from gateway.engine.answers.detokenizer import Detokenizer, Vocabulary
from gateway.engine.answers.output_parts import AnswerParser, Marks, OutputPart, strip_marks
from gateway.engine.answers.reasoning import Thinking
from gateway.engine.answers.stop_strings import StopScanner
from gateway.engine.generation.sampling import Sampler
from gateway.engine.grammar.compiling import CompiledGrammar
from gateway.engine.grammar.matching import BoundRow, Matcher
from gateway.jobs import (
    Delta,
    EchoedPrompt,
    FinishReason,
    Likelihood,
    SequenceParams,
    TokenLogprob,
)


@dataclass(slots=True)
class OutputProcessor:
    """Turns a sequence's tokens into parts: detokenises, parses, scans for stop strings."""

    decoder: Detokenizer
    parser: AnswerParser
    stops: StopScanner
    vocabulary: Vocabulary
    marks: Marks
    _parsed: int = 0
    _shown: int = 0
    _pending: list[tuple[int, TokenLogprob]] = field(default_factory=list)

    def push(
        self,
        token: int,
        scores: "TokenScores | None",
        *,
        is_shown_as_text: bool,
        may_stop: bool = True,
    ) -> list[OutputPart]:
        """Take a token; return the parts that are certain with it."""
        piece = self.marks.spelled(token)
        if piece is None:
            piece = self.decoder.push(token)
        begun, was_thinking = self._parsed, self.parser.is_thinking
        parts = [self._scan_for_stops(part, may_stop=may_stop) for part in self.parser.push(piece)]
        opens = self.parser.is_thinking and is_shown_as_text
        if scores is not None and not (was_thinking or opens):
            # The tokens' texts add up to the content. Only an answer of one token shows its text
            # even if that is not content: rerankers read it.
            text = strip_marks(piece)
            text = text if is_shown_as_text else text or self.vocabulary.text(token)
            self._pending.append((begun, scores.to_logprob(self.vocabulary, token, text)))
        return parts

    def finish(self) -> list[OutputPart]:
        """Return what was held back, once no more tokens come."""
        parts = [self._scan_for_stops(part) for part in self.parser.flush()]
        rest = self.stops.flush()
        self._shown += len(rest)
        return [*parts, OutputPart(text=rest)]

    def take_logprobs(self, *, is_last: bool) -> abc.Sequence[TokenLogprob]:
        """Return the logprobs of tokens whose text is out, never those of a stop string."""
        if not self._pending:
            return ()
        every = is_last and not self.stops.is_stopped
        ready = [(start, each) for start, each in self._pending if every or start < self._shown]
        self._pending = self._pending[len(ready) :]
        if not self.stops.is_stopped:
            return [each for _, each in ready]
        # A stop string may begin inside a token: only the text before it is shown.
        return [_cut_text(each, self._shown - start) for start, each in ready]

    def _scan_for_stops(self, part: OutputPart, *, may_stop: bool = True) -> OutputPart:
        if not part.text:
            return part
        self._parsed += len(part.text)
        text = self.stops.push(part.text) if may_stop else part.text
        self._shown += len(text)
        return part if text == part.text else OutputPart(text=text)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The logprobs of one token and of its likeliest alternatives, on the host."""

    chosen: float
    ids: abc.Sequence[int]
    logprobs: abc.Sequence[float]
    wanted: int

    def to_logprob(self, vocabulary: Vocabulary, token: int, piece: str) -> TokenLogprob:
        """Return the logprobs with texts. Alternatives that a grammar excludes are left out."""
        ranked = sorted(zip(self.logprobs, self.ids, strict=True), reverse=True)[: self.wanted]
        top = [
            Likelihood(vocabulary.text(i), vocabulary.bytes(i), logprob)
            for logprob, i in ranked
            if logprob > -math.inf
        ]
        return TokenLogprob(Likelihood(piece, vocabulary.bytes(token), self.chosen), top)


def _cut_text(logprob: TokenLogprob, length: int) -> TokenLogprob:
    chosen = logprob.chosen
    return replace(logprob, chosen=replace(chosen, token=chosen.token[:length]))


class Sequence:
    """One answer being written, made from its `SequenceParams`."""

    def __init__(
        self,
        sequence_id: int,
        job: SequenceParams,
        sampler: Sampler,
        output: OutputProcessor,
        eos_ids: frozenset[int],
        thinking: Thinking,
    ) -> None:
        self.id = sequence_id
        self.index = job.index
        self.job = job
        self.sampler = sampler
        # All tokens that the model must have read before the next one is chosen; never copied, as
        # it may be long.
        self.context: list[int] = [*job.prompt]
        self.tokens: list[int] = []
        self.prompt_logprobs: list[TokenLogprob] = []  # of all the prompt's tokens but the first
        self.cached_tokens = 0  # of the prompt, from the prefix cache
        self.kept_tokens = 0  # of the prompt, new in it
        self.kept_ends: list[int] = []  # so many first tokens have states kept while decoding
        self.is_suspect = False
        self.was_suspect = False
        self.is_broken = False
        self.is_held = False  # parked: does not run until it is resumed
        self._output = output
        self._eos_ids = eos_ids
        self._thinking = thinking
        sampling = job.sampling
        self._ends = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else eos_ids)
        assert job.compiled is None or isinstance(job.compiled, CompiledGrammar)
        self._grammar = job.compiled
        self._matcher = self._grammar.matcher() if self._grammar is not None else None
        self._matched = 0

    @property
    def adapter(self) -> int:
        """Return the number of its adapter, 0 for none."""
        return self.job.adapter.number if self.job.adapter is not None else 0

    @property
    def root(self) -> int:
        """Return where what is kept of its prompt begins: no two adapters have the same KV."""
        return -self.adapter

    @property
    def scores_prompt(self) -> bool:
        """Return True if the prompt's logprobs are wanted and not taken yet."""
        job = self.job
        return job.echoed is not None and job.logprobs is not None and not self.tokens

    def add_prompt_score(self, token: int, scores: TokenScores) -> None:
        """Append the logprobs of the prompt's next token."""
        assert self.job.echoed is not None
        text = self.job.echoed[len(self.prompt_logprobs) + 1]
        self.prompt_logprobs.append(scores.to_logprob(self._output.vocabulary, token, text))

    def error_delta(self, error: str, *, is_out_of_memory: bool = False) -> Delta:
        """Return the last delta of a sequence that fails."""
        return Delta(self.index, row=self.id, error=error, is_out_of_memory=is_out_of_memory)

    def echo_delta(self) -> Delta:
        """Return the only delta of a sequence that echoes its prompt and has no answer."""
        try:
            prompt = self._echo()
        except ValueError as error:
            return self.error_delta(str(error))
        cached = self.cached_tokens
        return Delta(
            self.index, finish_reason="length", cached_tokens=cached, prompt=prompt, row=self.id
        )

    def _echo(self) -> EchoedPrompt | None:
        """Return the prompt if it is echoed. Raises ValueError for logprobs that are NaN."""
        if self.job.echoed is None:
            return None
        if any(math.isnan(each.chosen.logprob) for each in self.prompt_logprobs):
            raise ValueError("its output is not a number")
        return EchoedPrompt(self.job.echoed, self.prompt_logprobs)

    @property
    def is_at_last(self) -> bool:
        """Return True if the next token is the last one allowed."""
        return len(self.tokens) + 1 >= self.job.max_tokens

    @property
    def matcher(self) -> Matcher | None:
        """Return the matcher that the next token must satisfy, if any."""
        return None if self._thinking.is_on else self._matcher

    @property
    def barred(self) -> frozenset[int]:
        """Return the tokens that must not be next because they would end the answer too soon."""
        return self._ends if len(self.tokens) < self.job.sampling.min_tokens else frozenset()

    @property
    def may_open_with(self) -> int | None:
        """Return the token that opens a block of thinking, if one may still come first."""
        return self._thinking.opens_with

    @property
    def thinking_first(self) -> Thinking | None:
        """Return the thinking under way if an answer held to a grammar must follow it."""
        return self._thinking if self._thinking.is_on and self._matcher is not None else None

    @property
    def is_over(self) -> bool:
        """Return True if the answer met a stop string, made its only allowed call, or broke."""
        one_call = self.job.calling is not None and not self.job.calling.parallel
        parser = self._output.parser
        made_its_call = one_call and parser.mode != "forced" and parser.calls > 0
        broke = self.is_broken or (self._matcher is not None and self._matcher.error is not None)
        return self._output.stops.is_stopped or made_its_call or broke

    def cap_tokens(self, max_tokens: int) -> None:
        self.job = replace(self.job, max_tokens=min(max_tokens, self.job.max_tokens))

    def preempt(self) -> None:
        """Prepare to be read again, from the prompt and the answer so far, with the same outcome.

        The token that was chosen and not yet appended is chosen again, with the random number of
        its position.
        """
        self.cached_tokens = self.kept_tokens = 0

    def end_early(self) -> list[Delta]:
        """End the answer here with `length`; return what was held back."""
        return self._deltas(self._output.finish(), "length", reasoned=False, tokens=0)

    def suspect(self, *, is_read_alone: bool) -> None:
        """Prepare to be read again after a step that failed."""
        self.is_suspect = is_read_alone
        self.was_suspect = self.was_suspect or is_read_alone
        self.preempt()
        if self._grammar is not None:
            matched = self.tokens[len(self.tokens) - self._matched :]
            self._matcher = self._grammar.matcher(matched)

    def bound(self, place: int) -> BoundRow | None:
        """Return what binds the next token, for this place in a batch; None if no grammar does."""
        if self.matcher is None:
            return None
        return BoundRow(place, self.matcher, self.may_open_with, self.barred)

    def forced(self, most: int) -> list[int]:
        """Return up to `most` tokens that the grammar leaves no choice of."""
        bound = self.bound(0)
        return bound.forced(most) if bound is not None else []

    def certainty(self, token: int) -> TokenScores | None:
        """Return the logprobs of a token that was forced, if logprobs are wanted."""
        wanted = self.job.logprobs
        return None if wanted is None else TokenScores(0.0, [token], [0.0], wanted)

    def room(self, limit: int) -> int:
        """Return how many tokens a draft may have, at most `limit`; 0 unless they can be chosen
        several at once: by logits that depend on no token before them.
        """
        depends = self._matcher is not None or self.barred or len(self.sampler.adjustments)
        if depends or self.job.logprobs is not None or not self.sampler.is_certain:
            return 0
        return max(0, min(limit, self.job.max_tokens - len(self.tokens) - 1))

    def append(self, token: int) -> FinishReason | None:
        """Append the next token; return the finish reason if, text aside, it is the last."""
        is_free = self._thinking.take(token)
        self.tokens.append(token)
        self.context.append(token)
        self.sampler.count(token)
        if token in self._ends:
            return "stop"
        if self._matcher is not None and not is_free:
            self._matcher.consume(token)
            self._matched += 1
            if self._matcher.is_over:
                return "stop"
        return "length" if len(self.tokens) >= self.job.max_tokens else None

    def to_deltas(self, ended: FinishReason | None, scores: TokenScores | None) -> list[Delta]:
        """Return the deltas that the newest token makes certain; the last has the finish reason."""
        if self._matcher is not None and self._matcher.error is not None:
            return [self.error_delta(f"its grammar broke: {self._matcher.error}")]
        token = self.tokens[-1]
        parts: list[OutputPart] = []
        was_thinking = self._output.parser.is_thinking
        is_end = token in self._ends or (token in self._eos_ids and self._matcher is not None)
        if not is_end or (scores is not None and len(self.tokens) == 1):
            # An answer of one token shows it, whatever it is: rerankers read its logprobs.
            is_only = ended is not None and len(self.tokens) == 1
            may_stop = len(self.tokens) > self.job.sampling.min_tokens
            parts = self._output.push(
                token, scores, is_shown_as_text=not is_only, may_stop=may_stop
            )
        if self.is_over:
            ended = "stop"
        if ended is not None:
            parts += self._output.finish()
        if ended == "stop" and self._output.parser.calls:
            ended = "tool_calls"
        return self._deltas(parts, ended, reasoned=was_thinking)

    def _deltas(
        self,
        parts: abc.Sequence[OutputPart],
        ended: FinishReason | None,
        *,
        reasoned: bool,
        tokens: int = 1,
    ) -> list[Delta]:
        ready = self._output.take_logprobs(is_last=ended is not None)
        # The token, its logprobs and the end go with the last of its parts.
        filled = [part for part in parts if part.text or part.reasoning or part.call]
        *others, last = filled or [OutputPart()]
        deltas = [
            Delta(self.index, part.text, reasoning=part.reasoning, call=part.call, row=self.id)
            for part in others
        ]
        deltas.append(
            Delta(
                self.index,
                last.text,
                tokens,
                ended,
                reasoning=last.reasoning,
                call=last.call,
                logprobs=ready,
                reasoning_tokens=int(reasoned),
                stop=self._output.stops.met if ended == "stop" else None,
                row=self.id,
            )
        )
        if tokens and len(self.tokens) == 1:
            cached, kept = self.cached_tokens, self.kept_tokens
            deltas[0] = replace(
                deltas[0], cached_tokens=cached, kept_tokens=kept, prompt=self._echo()
            )
        return deltas
