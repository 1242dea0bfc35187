"""One answer in the making: what it has read, said and may still say."""

from gateway.engine.sampling import Sampler
from gateway.engine.text import TextStream
from gateway.jobs import FinishReason, RowDelta, RowJob


class Row:
    """A `RowJob` inside the engine. Its tokens are told one at a time, in order."""

    __slots__ = ("eos_ids", "id", "is_suspect", "job", "sampler", "text", "tokens")

    def __init__(
        self,
        row_id: int,
        job: RowJob,
        sampler: Sampler,
        text: TextStream,
        eos_ids: frozenset[int],
    ) -> None:
        self.id = row_id
        self.job = job
        self.sampler = sampler
        self.text = text
        self.eos_ids = eos_ids
        self.tokens: list[int] = []
        self.is_suspect = False

    @property
    def context(self) -> list[int]:
        """Give all that the model must have read before the next token."""
        return [*self.job.prompt, *self.tokens]

    @property
    def is_at_last(self) -> bool:
        """Tell whether the next token is the last one allowed."""
        return len(self.tokens) + 1 >= self.job.max_tokens

    def suspect(self) -> None:
        """Prepare to be read again, alone, after a step that went wrong."""
        self.is_suspect = True
        self.sampler.recount(self.tokens)

    def say(self, token: int) -> FinishReason | None:
        """Take the next token; tell whether, without looking at the text, it is the last."""
        self.tokens.append(token)
        if token in self.eos_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.job.max_tokens else None

    def told(self, ended: FinishReason | None) -> RowDelta:
        """Give the text that the token just said makes certain."""
        token = self.tokens[-1]
        text = "" if token in self.eos_ids else self.text.push(token)
        if self.text.is_stopped:
            ended = "stop"
        elif ended is not None:
            text += self.text.flush()
        return RowDelta(self.id, text, 1, ended)
