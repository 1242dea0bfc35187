"""How many tokens a pass may have so that it keeps to a time limit, measured pass by pass."""

START_TOKENS = 512  # of the first pass, before anything is known
LEAST_TOKENS = 32  # fewer save nothing: a pass has a fixed cost
MOST_GROWTH = 4  # from one pass to the next: a short one predicts a long one badly
WELL_WITHIN = 0.75  # of the limit


def allowed_tokens(allowed: int, tokens: int, seconds: float, limit_s: float) -> int:
    """Return how many padded tokens the next pass may have, from a measured one.

    That one had `tokens` of the `allowed`. There are four cases:
    1. It had at least half of them and took more than half of the time: its speed holds.
    2. It was quicker: its speed holds, but the number grows by at most MOST_GROWTH.
    3. It was small and well within the limit: most of its time was the fixed cost of a pass, so
       the number may grow, and never shrinks.
    4. It was small and slow: something else may have delayed it, so the number halves at most.
    """
    if tokens <= 0 or seconds <= 0:
        return allowed
    in_limit = int(tokens * limit_s / seconds)
    is_small = 2 * tokens < allowed
    if 2 * seconds < limit_s or (is_small and seconds <= WELL_WITHIN * limit_s):
        return max(allowed, min(in_limit, MOST_GROWTH * allowed))
    return max(LEAST_TOKENS, in_limit, allowed // 2 if is_small else 0)


class Pace:
    """The tokens that a pass of one kind, of one model, may have: none should exceed `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.tokens = START_TOKENS

    def note(self, tokens: int, seconds: float) -> None:
        """Adjust to a pass of so many padded tokens."""
        self.tokens = allowed_tokens(self.tokens, tokens, seconds, self.limit_s)
