"""How fast a model computes, measured pass by pass, and how much work fits in a bound of time."""

START_TOKENS = 512  # of the first pass, before anything is known
LEAST_TOKENS = 32  # a pass costs something that no cutting saves
MOST_GROWTH = 4  # from one pass to the next: a short one says little of a long one
WELL_WITHIN = 0.75  # of the limit


def allowed_tokens(allowed: int, tokens: int, seconds: float, limit_s: float) -> int:
    """Return how many padded tokens the next pass may have, after one that was just measured.

    `allowed` is what that one might have had, `tokens` what it had. There are four cases:
    1. It had most of what it might and took more than half of the time: it tells the speed.
    2. It was quick for its tokens: so many more as its speed says, but not many times as many.
    3. It was small and well within the limit, so most of its time was what any pass costs: it
       tells nothing, or at most that more is possible.
    4. It was small and took as long or longer. Something else may have held it up, so what is
       allowed halves at most.
    """
    if tokens <= 0 or seconds <= 0:
        return allowed
    as_fast = int(tokens * limit_s / seconds)
    is_small = 2 * tokens < allowed
    if 2 * seconds < limit_s or (is_small and seconds <= WELL_WITHIN * limit_s):
        return max(allowed, min(as_fast, MOST_GROWTH * allowed))
    return max(LEAST_TOKENS, as_fast, allowed // 2 if is_small else 0)


class Pace:
    """What one kind of pass of one model may have, so that none takes longer than `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.tokens = START_TOKENS

    def note(self, tokens: int, seconds: float) -> None:
        """Learn from a pass of so many padded tokens."""
        self.tokens = allowed_tokens(self.tokens, tokens, seconds, self.limit_s)
