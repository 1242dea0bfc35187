"""The state of one answer during generation, and the search for the sequence that made a pass
fail.
"""

import math
from collections import abc
from dataclasses import replace
from typing import Final

from gateway.engine.answers.output_parts import OutputPart, OutputProcessor, TokenScores
from gateway.engine.answers.reasoning import Thinking
from gateway.engine.compiled_code import name_failure
from gateway.engine.device_faults import classify
from gateway.engine.generation.sampling import Sampler
from gateway.engine.grammar.compiling import CompiledGrammar
from gateway.engine.grammar.matching import BoundRow, Matcher
from gateway.engine.kv.prefix_cache import BLOCK, Root
from gateway.engine.vision.features import Images
from gateway.errors import Fault, PassFault
from gateway.jobs.chat import Delta, EchoedPrompt, FinishReason, TokenLogprob
from gateway.jobs.steps import Drafter, SequenceParams


class Sequence:
    """One answer during generation."""

    def __init__(
        self,
        sequence_id: int,
        params: SequenceParams,
        sampler: Sampler,
        output: OutputProcessor,
        eos_ids: frozenset[int],
        thinking: Thinking,
        images: Images | None = None,
    ) -> None:
        self.id = sequence_id
        self.images = images
        self.index = params.index
        self.params = params
        self.sampler = sampler
        self.context: list[int] = [*params.prompt]  # the prompt and the answer so far
        self.tokens: list[int] = []
        self.prompt_logprobs: list[TokenLogprob] = []  # one for each prompt token except the first
        self.cached_tokens = 0  # prompt tokens found in the prefix cache
        self.kept_tokens = 0  # prompt tokens added to the prefix cache
        self.unkept_tokens = 0  # prompt tokens that the prefix cache had no room for
        self.kept_ends: list[int] = []  # positions at which states were cached while decoding
        self.read_last = 0
        self.stops_at_blocks = False  # True if passes end at block ends, where states are cached
        self.is_suspect = False  # True after a failed pass, until the sequence is read alone
        self.was_suspect = False  # True once the sequence has been a suspect
        self.is_broken = False  # True if making the deltas raised an error
        self.is_held = False  # True if the sequence must not decode until it is resumed
        self._output = output
        self._eos_ids = eos_ids
        self._thinking = thinking
        sampling = params.sampling
        self._ends = sampling.stop_token_ids
        if not sampling.ignore_eos:
            self._ends |= eos_ids
        assert params.compiled is None or isinstance(params.compiled, CompiledGrammar)
        self._grammar = params.compiled
        self._matcher = None if self._grammar is None else self._grammar.matcher()
        self._matched = 0

    @property
    def has_images(self) -> bool:
        return self.images is not None

    @property
    def adapter(self) -> int:
        if self.params.adapter is None:
            return 0
        return self.params.adapter.number

    @property
    def root(self) -> Root:
        return self.adapter, self.params.cache_salt

    @property
    def scores_prompt(self) -> bool:
        params = self.params
        return params.echoed is not None and params.logprobs is not None and not self.tokens

    def add_prompt_score(self, token: int, scores: TokenScores) -> None:
        assert self.params.echoed is not None
        text = self.params.echoed[len(self.prompt_logprobs) + 1]
        self.prompt_logprobs.append(scores.to_logprob(self._output.vocabulary, token, text))

    def error_delta(self, error: str, *, is_out_of_memory: bool = False) -> Delta:
        return Delta(self.index, id=self.id, error=error, is_out_of_memory=is_out_of_memory)

    def echo_delta(self) -> Delta:
        try:
            prompt = self._echo()
        except ValueError as error:
            return self.error_delta(str(error))
        cached = self.cached_tokens
        return Delta(
            self.index, finish_reason="length", cached_tokens=cached, prompt=prompt, id=self.id
        )

    def _echo(self) -> EchoedPrompt | None:
        """Return the prompt if it is to be echoed. Raises ValueError for NaN logprobs."""
        if self.params.echoed is None:
            return None
        if any(math.isnan(token.chosen.logprob) for token in self.prompt_logprobs):
            raise ValueError("its output is not a number")
        return EchoedPrompt(self.params.echoed, self.prompt_logprobs)

    @property
    def is_at_last(self) -> bool:
        return len(self.tokens) + 1 >= self.params.max_tokens

    @property
    def matcher(self) -> Matcher | None:
        """Return the matcher that the next token must satisfy, if any."""
        return None if self._thinking.is_on else self._matcher

    @property
    def barred(self) -> frozenset[int]:
        """Return the EOS and stop tokens while they are forbidden by `min_tokens`."""
        if len(self.tokens) < self.params.sampling.min_tokens:
            return self._ends
        return frozenset()

    @property
    def forced_end(self) -> int | None:
        """Return the token that must be next because the thinking budget is spent, if any."""
        budget = self._thinking.budget
        if budget is None or self.matcher is not None or budget.forced in self.barred:
            return None
        return budget.forced

    @property
    def unwanted(self) -> frozenset[int]:
        """Return the tokens that may not be next, apart from those that a grammar excludes."""
        budget = self._thinking.budget
        if budget is None or self.matcher is not None:
            return self.barred
        return self.barred | budget.barred

    @property
    def thinking_first(self) -> Thinking | None:
        """Return the thinking in progress if a grammar binds the answer after it; else None."""
        if self._matcher is None or not self._thinking.is_on:
            return None
        return self._thinking

    @property
    def is_over(self) -> bool:
        """Return True if a stop string, the only allowed call or an error ended the answer."""
        one_call = self.params.calling is not None and not self.params.calling.parallel
        parser = self._output.parser
        made_its_call = one_call and parser.mode != "forced" and parser.calls > 0
        broke = self.is_broken or (self._matcher is not None and self._matcher.error is not None)
        return self._output.stops.is_stopped or made_its_call or broke

    def cap_tokens(self, max_tokens: int) -> None:
        self.params = replace(self.params, max_tokens=min(max_tokens, self.params.max_tokens))

    def preempt(self) -> None:
        """Prepare for reading all tokens again; a token not yet appended is chosen again."""
        self.cached_tokens = self.kept_tokens = 0

    def end_early(self) -> list[Delta]:
        """End the answer with finish reason `length`; return deltas with the text held back."""
        return self._deltas(self._output.finish(is_cut=True), "length", reasoned=False, tokens=0)

    def suspect(self, *, is_read_alone: bool) -> None:
        self.is_suspect = is_read_alone
        self.was_suspect = self.was_suspect or is_read_alone
        self.preempt()
        if self._grammar is not None:
            matched = self.tokens[len(self.tokens) - self._matched :]
            self._matcher = self._grammar.matcher(matched)

    def bound(self, place: int) -> BoundRow | None:
        """Return the grammar's constraint on row `place` of a batch; None without a grammar."""
        if self.matcher is None:
            return None
        return BoundRow(place, self.matcher, self._thinking.opens_with, self.barred)

    def forced(self, limit: int) -> list[int]:
        bound = self.bound(0)
        if bound is None:
            return []
        return bound.forced(self._ahead(limit))

    def _ahead(self, limit: int) -> int:
        return min(limit, -len(self.context) % BLOCK) if self.stops_at_blocks else limit

    def certainty(self, token: int) -> TokenScores | None:
        """Return a logprob of 0 for a forced token, if logprobs are requested."""
        if self.params.logprobs is None:
            return None
        return TokenScores(0.0, [token], [0.0], self.params.logprobs)

    def room(self, limit: int) -> int:
        """Return how many tokens a draft may have, up to `limit`."""
        # Penalties and grammars need each token before the next one is chosen.
        depends = self._matcher is not None or self.barred or len(self.sampler.adjustments)
        if depends or self.params.logprobs is not None or not self.sampler.is_certain:
            return 0
        room = max(0, min(self._ahead(limit), self.params.max_tokens - len(self.tokens) - 1))
        budget = self._thinking.budget
        return room if budget is None else budget.room(room)

    def append(self, token: int) -> FinishReason | None:
        """Append the next token; return the finish reason if the token itself ends the answer."""
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
        return "length" if len(self.tokens) >= self.params.max_tokens else None

    def to_deltas(self, ended: FinishReason | None, scores: TokenScores | None) -> list[Delta]:
        """Return the deltas of the newest token, with text that was held back before."""
        if self._matcher is not None and self._matcher.error is not None:
            return [self.error_delta(f"its grammar broke: {self._matcher.error}")]
        token = self.tokens[-1]
        parts: list[OutputPart] = []
        was_thinking = self._output.parser.is_thinking
        is_end = token in self._ends or (token in self._eos_ids and self._matcher is not None)
        if not is_end or (scores is not None and len(self.tokens) == 1):
            # An answer's only token is returned even if special: rerankers need its logprobs.
            is_only = ended is not None and len(self.tokens) == 1
            may_stop = len(self.tokens) > self.params.sampling.min_tokens
            parts = self._output.push(
                token, scores, is_shown_as_text=not is_only, may_stop=may_stop
            )
        if self.is_over:
            ended = "stop"
        if ended is not None:
            parts += self._output.finish(is_cut=ended == "length")
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
        filled = [part for part in parts if part.text or part.reasoning or part.call]
        *first, last = filled or [OutputPart()]
        deltas = [
            Delta(self.index, part.text, reasoning=part.reasoning, call=part.call, id=self.id)
            for part in first
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
                id=self.id,
            )
        )
        if tokens and len(self.tokens) == 1:
            deltas[0] = replace(
                deltas[0],
                cached_tokens=self.cached_tokens,
                kept_tokens=self.kept_tokens,
                unkept_tokens=self.unkept_tokens,
                prompt=self._echo(),
            )
        return deltas


# Batching stops after this many failed passes whose sequences all succeeded alone.
FAULTS: Final = 3


class Faults:
    """The failed passes, and the sequences that may have caused them.

    The sequences of a failed pass are read again alone. If all of them succeed, batching was the
    cause.
    """

    def __init__(self) -> None:
        self._suspects: list[set[int]] = []
        self._untold: list[PassFault] = []
        self._count = 0

    @property
    def is_batching_to_blame(self) -> bool:
        return self._count >= FAULTS

    def blame(self, seqs: abc.Sequence[Sequence], error: Exception) -> Delta | None:
        """Record the error of a pass, and prepare its sequences for being read again.

        If the only sequence already was a suspect, return the delta that ends it instead.
        """
        error = name_failure(error)
        fault = classify(error)
        self.record([seq.id for seq in seqs], fault, error)
        if len(seqs) == 1 and seqs[0].is_suspect:
            self.dismiss(seqs[0].id)
            message = f"{type(error).__name__}: {error}"
            return seqs[0].error_delta(message, is_out_of_memory=fault is Fault.PRESSURE)
        for seq in seqs:
            # After a shortage of memory, several sequences are read together again, fewer at once.
            seq.suspect(is_read_alone=len(seqs) == 1 or fault is not Fault.PRESSURE)
        return None

    def record(self, ids: abc.Sequence[int], fault: Fault, error: Exception) -> None:
        """Record the error of a pass. If batching may be the cause, its sequences are suspects."""
        self._record(fault, f"{len(ids)} rows", error)
        if len(ids) > 1 and fault not in (Fault.PRESSURE, Fault.COMPILER):
            self._suspects.append(set(ids))

    def record_draft(self, drafter: Drafter, error: Exception) -> None:
        where = f"{drafter.replace('_', ' ')}, off now"
        self._record(classify(error), where, name_failure(error))

    def _record(self, fault: Fault, where: str, error: Exception) -> None:
        message = f"{where}: {type(error).__name__}: {str(error)[:500]}"
        self._untold.append(PassFault(fault, message))

    def clear_of_blame(self, seq: int) -> None:
        for suspects in self._suspects:
            suspects.discard(seq)
        self._count += sum(1 for suspects in self._suspects if not suspects)
        self._suspects = [suspects for suspects in self._suspects if suspects]

    def dismiss(self, seq: int) -> None:
        """Forget the failed passes of a sequence that failed alone or left."""
        self._suspects = [suspects for suspects in self._suspects if seq not in suspects]

    def take(self) -> list[PassFault]:
        untold, self._untold = self._untold, []
        return untold
