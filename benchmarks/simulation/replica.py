"""One gateway on paper.

The gateway's own functions decide who is next, which rows share a pass and how long it waits for
more; only the passes, and Python, are replaced by their seconds.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice

from benchmarks.simulation.device import Device
from benchmarks.simulation.load import Request
from gateway.engine.generation.prefill import REST_SHARE, take_prompts
from gateway.serving.embedding.policy import EmbeddingLimits, patience, take_batch, window
from gateway.serving.generation.batcher import PREFILL_FIRST_PASSES
from gateway.serving.generation.policy import GenerationLimits, prefill_goes_first
from gateway.serving.generation.scheduler import STEPS_PER_TURN
from gateway.serving.lane import FairQueue, Pace

EMBEDDING, PREFILL, DECODE = KINDS = ("embedding", "prefill", "decode")
LEAST_S = 1e-7  # shorter waits are rounding


class Events:
    """A heap of events by their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, moment: float, act: Callable[[], None]) -> None:
        """Call `act` at that moment; of equals, the first to be asked for."""
        heapq.heappush(self._heap, (max(moment, self.now), next(self._numbers), act))

    def run(self) -> None:
        """Run until nothing is left to happen."""
        while self._heap:
            self.now, _, act = heapq.heappop(self._heap)
            act()


class Python:
    """One process's Python: one thing at a time, first come, first served."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._given_s = 0.0
        self.free_at = 0.0

    @property
    def done_s(self) -> float:
        """Return the seconds worked so far."""
        return self._given_s - max(0.0, self.free_at - self._events.now)

    def do(self, seconds: float, then: Callable[[], None]) -> None:
        """Work for so long once all before it is done."""
        self.free_at = max(self._events.now, self.free_at) + seconds
        self._given_s += seconds
        self._events.at(self.free_at, then)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of a gateway, as its settings have them, and the weights of its lane."""

    embedding: EmbeddingLimits
    generation: GenerationLimits
    weights: dict[str, float]


class Replica:
    """A gateway with one embedding model and one chat model.

    `beside` is other Python on the same cores, a client's; `answered` is called with each request
    that ends, and the tokens that it was given.
    """

    def __init__(
        self,
        events: Events,
        device: Device,
        limits: Limits,
        answered: Callable[[Request], None],
        beside: Python | None = None,
    ) -> None:
        self.in_flight = 0
        self._events = events
        self._device = device
        self._limits = limits
        self._answered = answered
        self._python = Python(events)
        self._beside = beside
        # embeddings
        self._coming: dict[Request, None] = {}  # being read or tokenized
        self._waiting: deque[Request] = deque()
        self._embedding_tokens = 0
        self._embedding_pace = Pace(limits.embedding.pass_limit_s)
        # chats
        self._chats = 0
        self._chat_tokens = 0
        self._queued: deque[Request] = deque()
        self._line: deque[Request] = deque()  # joined, with prompt left to read
        self._decoding: list[Request] = []
        self._prefill_pace = Pace(limits.generation.pass_limit_s)
        self._decode_waits_since: float | None = None
        # the lane
        self._fair = FairQueue(limits.weights)
        self._held: str | None = None
        self._last: str | None = None
        self._lane_waiters: list[str] = []
        self._gained = 0.0
        self._steps = 0

    def offer(self, request: Request) -> bool:
        """Take a request; return False if the queue is full, which the gateway answers with 429."""
        embedding, generation = self._limits.embedding, self._limits.generation
        if request.is_chat:
            tokens = self._chat_tokens + request.tokens
            if self._chats >= generation.queue_limit or tokens > generation.queue_max_tokens:
                return False
            self._chats += 1
            self._chat_tokens = tokens
        else:
            tokens = self._embedding_tokens + request.tokens
            if self._embedding_tokens and tokens > embedding.queue_max_tokens:
                return False
            self._embedding_tokens = tokens
            self._coming[request] = None
        self.in_flight += 1
        cost = self._device.chat_s if request.is_chat else self._device.embedding_s
        self._python.do(cost / 2, lambda: self._queue(request))
        return True

    def _queue(self, request: Request) -> None:
        if request.is_chat:
            self._queued.append(request)
            self._ask(PREFILL)
        else:
            del self._coming[request]
            self._waiting.append(request)
            self._ask(EMBEDDING)

    def _end(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.in_flight -= 1
            if request.is_chat:
                self._chats -= 1
                self._chat_tokens -= request.tokens
            else:
                self._embedding_tokens -= request.tokens
            self._answered(request)

    # The lane: its turns, as serving/lane.py gives them.

    def _ask(self, kind: str) -> None:
        """Begin a turn, or wait for it, if there is work of that kind."""
        if kind == self._held or kind in self._lane_waiters or not self._has_work(kind):
            return
        if self._held is not None:
            self._lane_waiters.append(kind)
        elif kind != EMBEDDING or self._is_collected():
            self._begin(kind)

    def _has_work(self, kind: str) -> bool:
        if kind == EMBEDDING:
            return bool(self._waiting)
        if kind == PREFILL:
            return bool(self._line or (self._queued and self._places > 0))
        return bool(self._decoding) and not self._prefill_goes_first()

    def _is_collected(self) -> bool:
        """Return True if a pass may begin; else try again when its patience has ended."""
        limits, now = self._limits.embedding, self._events.now
        newest = next(reversed(self._coming), None)
        more_s = patience(
            len(self._waiting),
            now - self._waiting[0].arrived,
            window(len(self._waiting) + len(self._coming), limits),
            limits,
            newest_age_s=None if newest is None else now - newest.arrived,
        )
        if more_s > LEAST_S:
            self._events.at(now + more_s, lambda: self._ask(EMBEDDING))
        return more_s <= LEAST_S

    def _begin(self, kind: str) -> None:
        self._fair.begin(kind)
        self._held, self._gained, self._steps = kind, self._events.now, 0
        self._start_pass()

    def _start_pass(self) -> None:
        """Hop to the lane's thread, once Python gets round to it."""
        begun = max(self._events.now, self._python.free_at) + self._device.turn_s
        self._events.at(begun, self._pass)

    def _pass(self) -> None:
        if self._held == EMBEDDING:
            seconds, finish = self._embed()
        elif self._held == PREFILL:
            seconds, finish = self._read()
        else:
            seconds, finish = self._step()
        started, done_s = self._events.now, self._python_s()

        def end() -> None:
            """End the pass, later by the time that Python took of its cores meanwhile."""
            nonlocal done_s
            now_done_s = self._python_s()
            more_s = self._device.contention * (now_done_s - done_s)
            done_s = now_done_s
            if more_s > LEAST_S:
                self._events.at(self._events.now + more_s, end)
            else:
                finish(self._events.now - started)

        self._events.at(started + seconds, end)

    def _python_s(self) -> float:
        beside = 0.0 if self._beside is None else self._beside.done_s
        return self._python.done_s + beside

    def _is_up(self) -> bool:
        assert self._held is not None
        waited = self._events.now - self._gained
        return self._fair.is_up(self._held, waited, self._lane_waiters)

    def _end_turn(self) -> None:
        ended = self._held
        assert ended is not None
        self._fair.end(ended, self._events.now - self._gained)
        self._held, self._last = None, ended
        self._lane_waiters = [kind for kind in self._lane_waiters if self._has_work(kind)]
        if self._lane_waiters:
            self._begin(self._lane_waiters.pop(self._fair.choose(self._lane_waiters)))
        elif ended != EMBEDDING:
            self._ask(ended)  # asked at once: a chat model's worker does not let go between
        for kind in KINDS:  # one's turn may be work for another
            self._ask(kind)

    # Embeddings: serving/embedding/row_batcher.py.

    def _embed(self) -> tuple[float, Callable[[float], None]]:
        limits, pace = self._limits.embedding, self._embedding_pace
        first = list(islice(self._waiting, limits.max_batch_size))
        most = min(limits.max_batch_tokens, pace.tokens)
        counts = take_batch([[each.tokens] for each in first], limits.max_batch_size, most)
        batch = [each for each, taken in zip(first, counts, strict=True) if taken]
        rest = [each for each, taken in zip(first, counts, strict=True) if not taken]
        for _ in first:
            self._waiting.popleft()
        self._waiting.extendleft(reversed(rest))
        padded = len(batch) * max(each.tokens for each in batch)

        def finish(seconds: float) -> None:
            pace.note(padded, seconds)
            goes_on = self._waiting and self._lane_waiters and not self._is_up()
            if goes_on:
                self._start_pass()
            else:
                self._end_turn()
            for each in batch:
                self._python.do(self._device.embedding_s / 2, partial(self._end, [each]))

        return self._device.embedding(padded), finish

    # Chats: serving/generation/batcher.py and engine/generation/prefill.py.

    @property
    def _places(self) -> int:
        running = len(self._line) + len(self._decoding)
        return self._limits.generation.max_batch_size - running

    @property
    def _pass_tokens(self) -> int:
        return min(self._limits.generation.prefill_chunk_tokens, self._prefill_pace.tokens)

    def _prefill_goes_first(self) -> bool:
        if not self._line:
            return False
        now, most = self._events.now, PREFILL_FIRST_PASSES * self._pass_tokens
        if self._decode_waits_since is None:
            self._decode_waits_since = now
        soon = sum(each.tokens <= most for each in self._line)
        bound_s = PREFILL_FIRST_PASSES * self._limits.generation.pass_limit_s
        waited_s = now - self._decode_waits_since
        return prefill_goes_first(soon, len(self._decoding), waited_s, bound_s)

    def _read(self) -> tuple[float, Callable[[float], None]]:
        """Read a chunk: of several short prompts, or a part of a long one. With the last of a
        prompt comes the first token of its answer.
        """
        while self._queued and self._places > 0:
            self._line.append(self._queued.popleft())
        most, line = self._pass_tokens, self._line
        is_whole = [each.left == each.tokens for each in line]
        whole = is_whole.index(False) if False in is_whole else len(line)
        rows = max(1, take_prompts(([each.left] for each in islice(line, whole)), most))
        batch = [line.popleft() for _ in range(rows)]
        longest = max(each.left for each in batch)
        chunk = longest if longest <= most + most // REST_SHARE else most
        padded = rows * chunk

        def finish(seconds: float) -> None:
            self._prefill_pace.note(padded, seconds)
            for each in batch:
                each.left = max(0, each.left - chunk)
            self._line.extend(each for each in batch if each.left)
            if read := [each for each in batch if not each.left]:
                self._write(read)
            if self._line and self._lane_waiters and not self._is_up():
                self._start_pass()
            else:
                self._end_turn()

        return self._device.prefill(padded), finish

    def _step(self) -> tuple[float, Callable[[float], None]]:
        """Write a token of each row."""
        rows = list(self._decoding)
        self._decode_waits_since = None

        def finish(_: float) -> None:
            self._steps += 1
            self._decoding = []
            self._write(rows)
            if self._decoding and self._steps < STEPS_PER_TURN and not self._is_up():
                self._pass()  # no hop: the lane's thread goes on
            else:
                self._end_turn()

        more_s = self._device.resume_s if self._last != DECODE and not self._steps else 0.0
        return self._device.decode(len(rows)) + more_s, finish

    def _write(self, rows: Sequence[Request]) -> None:
        """Give each row a token; those that want more go on."""
        new = []
        for each in rows:
            if each.is_written:
                each.left -= 1
            else:
                each.is_written = True
                each.left = each.answer - 1
                new.append(each)
        ended = [each for each in rows if not each.left]
        self._decoding.extend(each for each in rows if each.left)
        seconds = self._device.token_s * len(rows) + self._device.chat_s / 2 * len(ended)
        self._python.do(seconds, lambda: self._deliver(new, ended))

    def _deliver(self, new: Sequence[Request], ended: Sequence[Request]) -> None:
        for each in new:
            each.first = self._events.now
        self._end(ended)
        if ended:
            self._ask(PREFILL)  # a place is free
