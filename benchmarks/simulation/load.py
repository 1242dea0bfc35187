"""The load: requests at random moments, the same for the same seed."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random


@dataclass(slots=True, eq=False)
class Request:
    """A request on paper: `tokens` to read, and `answer` tokens to write (0: an embedding).

    `left` are the tokens still to read or, once `is_written` has begun, to write.
    """

    arrived: float
    tokens: int
    answer: int = 0
    first: float | None = None
    ended: float | None = None
    is_written: bool = False
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.tokens

    @property
    def is_chat(self) -> bool:
        """Return True if tokens are written."""
        return self.answer > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The share of chats among the requests, and the tokens of each kind."""

    chats: float
    text_tokens: int = 20
    prompt_tokens: int = 40
    answer_tokens: int = 64

    def requests(self, per_s: float, seconds: float, seed: int) -> Iterator[Request]:
        """Yield requests in order: gaps are exponential, so that they come as strangers do."""
        random, now = Random(seed), 0.0
        while (now := now + random.expovariate(per_s)) < seconds:
            if random.random() < self.chats:
                yield Request(now, self.prompt_tokens, self.answer_tokens)
            else:
                yield Request(now, self.text_tokens)
