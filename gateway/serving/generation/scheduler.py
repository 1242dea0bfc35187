"""One chat model's rows: who waits, who runs, who leaves, who joins next, and who gives way."""

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gateway import metrics
from gateway.errors import GatewayError
from gateway.serving.generation.memory import GROWTH, MARGIN, Layout, RowMemory
from gateway.serving.generation.policy import GenerationLimits, Verdict, Waiting
from gateway.serving.generation.sequence import Moves, Ticket
from gateway.serving.lane import Turn

PREEMPTIONS = 2  # of a row at the most; then it keeps its memory, and younger ones yield
QUANTUM = 64  # tokens that a bound row says before another's turn
LOOK_AGAIN_S = 0.25  # for a model that has been idle long enough to leave


class Rows:
    """Their tickets, and the memory that their KV may take. All of it on the loop.

    Rows inside are active or held. A held one has its KV, or is being read, and does not run: more
    rows are bound to grammars than may run at once. Those take turns, a quantum of tokens each, so
    that an answer waits in proportion to the quantum and not to the longest answer before it; the
    shortest cannot go first, for nobody knows which that is.
    """

    def __init__(self, model: str, limits: GenerationLimits, memory: RowMemory) -> None:
        self.memory = memory
        self.leaving: list[int] = []
        self._model = model
        self.limits = limits
        self._waiting = Waiting()
        self._inside: dict[int, Ticket] = {}
        self._held: deque[Ticket] = deque()  # in the order of their turns
        self._reading: frozenset[int] = frozenset()
        self._ending: dict[int, Ticket] = {}  # preempted, to end with what they have said
        self._wanting: Ticket | None = None  # the first that joins once there is memory
        self._stuck: list[Ticket] = []

    @property
    def waiting(self) -> int:
        """Count those that have yet to join, or to join again."""
        return len(self._waiting)

    @property
    def parked(self) -> int:
        """Count those that have their KV and wait for their turn."""
        return sum(each.row not in self._reading for each in self._held)

    @property
    def reading(self) -> int:
        """Count those whose prompts are being read."""
        return len(self._reading)

    @property
    def decoding(self) -> int:
        """Count those that are given tokens."""
        return sum(not each.is_held and each.row not in self._reading for each in self)

    @property
    def is_wanting(self) -> bool:
        """Tell whether one could have joined, had there been memory, when last it was looked."""
        return self._wanting is not None

    @property
    def may_join(self) -> bool:
        """Tell whether one joins now, or whether what is kept of prompts has to go."""
        if self.memory.must_forget or self._chosen():
            return True
        return self.memory.kept > 0 and self.is_wanting

    @property
    def must_move(self) -> bool:
        """Tell whether some have to leave, to end or to take turns, though none decodes."""
        return bool(self.leaving or self._ending or self._turns().going)

    def __iter__(self) -> Iterator[Ticket]:
        """Walk those inside."""
        return iter(self._inside.values())

    def get(self, row: int) -> Ticket | None:
        """Return the ticket of a row, if it is inside."""
        return self._inside.get(row) or self._ending.get(row)

    def wait(self, tickets: Iterable[Ticket]) -> None:
        """Let them stand in line."""
        for ticket in tickets:
            self._waiting.add(ticket)

    def joined(self, ticket: Ticket, row: int) -> bool:
        """Note that it is inside; False where it was given up meanwhile, and leaves again."""
        ticket.row = row
        if ticket.is_over:
            self.leaving.append(row)
        else:
            self._enter(ticket, row)
        return not ticket.is_over

    def ended(self, row: int) -> None:
        """Note that it has said its last."""
        if self._ending.pop(row, None) is None:
            self._exit(self._inside[row], row)

    def settled(self, reading: frozenset[int]) -> None:
        """Note which rows are being read still, after a turn."""
        self._reading = reading

    def drop(self, tickets: Sequence[Ticket]) -> bool:
        """Let every row of a job go; tell whether one that runs has to leave.

        One that is joining this very moment is sent away by `joined`.
        """
        for ticket in tickets:
            if ticket.is_over:
                continue
            ticket.is_over = True
            if ticket.is_in_line:
                self._waiting.give_up(ticket)
            if ticket.row is not None:
                self.leaving.append(ticket.row)
                if self._inside.get(ticket.row) is ticket:
                    self._exit(ticket, ticket.row)
                self._ending.pop(ticket.row, None)
        return bool(self.leaving)

    def end_running(self, error: GatewayError) -> None:
        """End those that the engine knows, with an error."""
        preempted = [ticket for ticket in self._waiting if ticket.row is not None]
        known = [*self._inside.values(), *self._ending.values(), *preempted]
        for ticket in known:
            ticket.end(error)
        for ticket in preempted:
            self._waiting.give_up(ticket)
        self.leaving += [ticket.row for ticket in known if ticket.row is not None]
        self._inside.clear()
        self._ending.clear()
        self._held.clear()

    def end_stuck(self, error: GatewayError) -> None:
        """End those that have waited long enough for memory that only others hold.

        One that has said something already ends there, with `length`.
        """
        now = asyncio.get_running_loop().time()
        for ticket in self._stuck:
            is_due = ticket.stuck_since is not None and now >= self._patience(ticket)
            if ticket.is_over or not is_due:
                continue
            if ticket.row is not None and ticket.tokens:
                self._waiting.take([ticket])
                self._ending[ticket.row] = ticket
            else:
                ticket.end(error)
                self._waiting.give_up(ticket)
                if ticket.row is not None:
                    self.leaving.append(ticket.row)

    def end_all(self, error: GatewayError) -> None:
        """End every one, with an error."""
        self.end_running(error)
        for ticket in self._waiting:
            ticket.end(error)
        self._waiting.clear()

    def look_again_at(self) -> float | None:
        """Return when, by the loop's clock, to look again for those who want memory, or to end
        those who want it too long; None while nobody does.
        """
        self._chosen()
        if not self.is_wanting:
            return None
        soon = asyncio.get_running_loop().time() + LOOK_AGAIN_S
        return min([soon, *map(self._patience, self._stuck)])

    def moves(self, turn: Turn, *, may_join: bool) -> Moves:
        """Choose only now, holding the lane, who gives way, who goes on and who joins.

        What runs has room by then for the turn's steps and the pass launched ahead of the last.
        """
        moves = Moves(asyncio.get_running_loop(), leaving=self.leaving)
        self.leaving = []
        moves.curtailed = [(row, ticket.tokens) for row, ticket in self._ending.items()]
        self._take_turns(moves)
        self._grow(moves)
        if may_join:
            if self.memory.must_forget:
                self._forget(moves)
            chosen = self._chosen()
            if not chosen and self.is_wanting and self.memory.kept:
                self._forget(moves)
                chosen = self._chosen()
            self._join(moves, chosen, turn)
        self.hold(moves.joining)
        return moves

    def hold(self, joining: Sequence[Ticket] = ()) -> None:
        """Hold the memory of those that are inside or join, and no more."""
        self.memory.hold(_layout([*self, *joining]))

    def make_room(self) -> None:
        """Let idle models go for the next to join."""
        if self._wanting is not None and not self._wanting.is_over:
            self.memory.make_room(_layout([*self, self._wanting]), is_pressing=not self._inside)

    def _enter(self, ticket: Ticket, row: int) -> None:
        self._inside[row] = ticket
        ticket.turn_began = ticket.tokens
        if ticket.is_held:
            self._held.append(ticket)

    def _exit(self, ticket: Ticket, row: int) -> None:
        del self._inside[row]
        if ticket.is_held:
            self._held.remove(ticket)

    def _active(self, *, bound: bool = False) -> list[Ticket]:
        """List those that run or are read to run, or the bound ones among them."""
        return [each for each in self if not each.is_held and (each.is_bound or not bound)]

    def _chosen(self) -> list[Ticket]:
        """Choose who joins: as many as there are places, and memory, for."""
        joining: list[Ticket] = []
        self._wanting, self._stuck = None, []
        places = self.limits.max_batch_size - len(self._active())
        held_places = self.limits.max_batch_size - len(self._held)
        free_bound = self._free_bound()
        now = asyncio.get_running_loop().time()
        if max(places, held_places) <= 0 or not self._waiting or self._turns().is_barred:
            return joining

        def verdict(ticket: Ticket) -> Verdict:
            nonlocal places, held_places, free_bound
            is_held = ticket.is_bound and (free_bound <= 0 or places <= 0)
            if (held_places if is_held else places) <= 0:
                return Verdict.IS_PASSED
            ticket.is_held = is_held
            ticket.length = self.memory.granted(ticket.used, ticket.whole, ticket.preemptions)
            if not self._may_stay(ticket, joining):
                return Verdict.IS_PASSED
            if self.memory.fits(_layout([*self, *joining, ticket])):
                joining.append(ticket)
                ticket.stuck_since = None
                places -= not is_held
                held_places -= is_held
                free_bound -= ticket.is_bound and not is_held
                return Verdict.JOINS
            self._wanting = self._wanting or ticket
            if self.memory.fits(_layout([ticket])):
                ticket.stuck_since = None
                return Verdict.BARS  # until rows of this model give back what it needs
            if ticket.stuck_since is None:
                ticket.stuck_since = now
            self._stuck.append(ticket)
            return Verdict.IS_PASSED

        return self._waiting.ask(Counter(each.request for each in self), verdict)

    def _may_stay(self, ticket: Ticket, joining: Sequence[Ticket]) -> bool:
        """Tell whether one that may not be preempted again could run to its end beside the others
        of which that is true.
        """
        if ticket.preemptions < PREEMPTIONS:
            return True
        others = [each for each in (*self, *joining) if each.preemptions >= PREEMPTIONS]
        wholes = [each.whole for each in (*others, ticket)]
        return not others or self.memory.fits(Layout(wholes))

    def _join(self, moves: Moves, chosen: Sequence[Ticket], turn: Turn) -> None:
        self._waiting.take(chosen)
        for ticket in chosen:
            if ticket.row is None:
                ticket.join(turn)
                moves.joining.append(ticket)
            else:
                self._enter(ticket, ticket.row)
                moves.rejoining.append(ticket)

    def _forget(self, moves: Moves) -> None:
        moves.forgets = True
        self.memory.forget()

    def _patience(self, ticket: Ticket) -> float:
        """Return until when one that is stuck is waited with."""
        since = ticket.stuck_since
        assert since is not None
        return since + self.limits.memory_wait_s

    def _free_bound(self) -> int:
        """Count the bound rows that may run beside those that do, or will in a moment."""
        return self.limits.structured_rows - len(self._active(bound=True)) - len(self._held)

    def _turns(self) -> "_Turns":
        """Choose which bound rows stop for others, and which of those that were held go on."""
        turns = _Turns()
        ready = deque(each for each in self._held if each.row not in self._reading)
        if not ready:
            return turns
        bound = self._active(bound=True)
        places = self.limits.max_batch_size - len(self._active())
        free = min(self.limits.structured_rows - len(bound), places)
        spent = [each for each in bound if each.tokens - each.turn_began >= QUANTUM]
        while ready and (free > 0 or spent):
            stops = [] if free > 0 else [spent[0]]
            going, stopping = [*turns.going, ready[0]], [*turns.stopping, *stops]
            # What has its memory already may always go on where nothing else runs.
            is_alone = not self._active() and not turns.going
            if not is_alone and not self.memory.fits(_layout(self, going, stopping), grown=True):
                turns.is_barred = free > 0
                break
            turns.going, turns.stopping = going, stopping
            ready.popleft()
            free -= not stops
            del spent[: len(stops)]
        return turns

    def _take_turns(self, moves: Moves) -> None:
        turns = self._turns()
        for ticket in turns.stopping:
            assert ticket.row is not None
            ticket.is_held = True
            self._held.append(ticket)
            moves.parked.append(ticket.row)
        for ticket in turns.going:
            assert ticket.row is not None
            ticket.is_held = False
            self._held.remove(ticket)
            ticket.turn_began = ticket.tokens
            moves.resumed.append(ticket.row)

    def _grow(self, moves: Moves) -> None:
        """Give rows memory before they need it, the oldest first. Where there is none the youngest
        give theirs back; one that is alone ends there.
        """
        for ticket in sorted(self._active(), key=_age):
            if ticket.row in self._inside and ticket.needs_more:
                self._grow_one(ticket, moves)

    def _grow_one(self, ticket: Ticket, moves: Moves) -> None:
        assert ticket.row is not None
        least = min(ticket.whole, ticket.used + MARGIN)
        before, ticket.length = ticket.length, min(ticket.whole, ticket.used + MARGIN + GROWTH)
        if self._fits_all():
            return
        if len(self._inside) == 1:
            # In time, perhaps, for its next.
            self.memory.make_room(_layout(self), is_pressing=True)
        ticket.length = least
        while not self._fits_all():
            if self.memory.kept:
                self._forget(moves)
            elif len(self._inside) == 1:
                ticket.length = before
                moves.curtailed.append((ticket.row, ticket.cap_tokens()))
                return
            else:
                self._preempt(self._youngest(), moves)
                if ticket.row not in self._inside:
                    return

    def _fits_all(self) -> bool:
        return self.memory.fits(_layout(self), grown=True)

    def _youngest(self) -> Ticket:
        """Choose who gives way: of those that may, one that is held before one that runs."""
        able = [each for each in self if each.preemptions < PREEMPTIONS]
        # None is able only where others took memory that these had been sure of.
        return max(able or self, key=lambda each: (each.is_held, *_age(each)))

    def _preempt(self, ticket: Ticket, moves: Moves) -> None:
        assert ticket.row is not None
        self._exit(ticket, ticket.row)
        moves.preempted.append(ticket.row)
        ticket.preempt()
        self._waiting.put_back(ticket)
        metrics.of(metrics.PREEMPTIONS, self._model).inc()


@dataclass(slots=True)
class _Turns:
    """Bound rows that stop and go on; `is_barred` where one could go on, had it memory: then nobody
    joins, who might take it.
    """

    stopping: list[Ticket] = field(default_factory=list)
    going: list[Ticket] = field(default_factory=list)
    is_barred: bool = False


def _age(ticket: Ticket) -> tuple[float, int]:
    """Order rows from the oldest on."""
    return ticket.rank, ticket.index


def _layout(
    tickets: Iterable[Ticket], going: Sequence[Ticket] = (), stopping: Sequence[Ticket] = ()
) -> Layout:
    """Lay rows out as they are, or as they would be if some went on and others stopped."""
    together: list[int] = []
    apart: list[int] = []
    for ticket in tickets:
        is_held = (ticket.is_held or ticket in stopping) and ticket not in going
        (apart if is_held or not ticket.will_decode else together).append(ticket.length)
    return Layout(together, apart)
