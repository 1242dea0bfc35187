"""Ends an answer before its first stop string."""

from collections.abc import Collection, Sequence


def held_back(text: str, marks: Collection[str]) -> int:
    """Return how many characters at the end of `text` may begin one of `marks`."""
    longest = max(map(len, marks), default=1) - 1
    if not any(mark[:1] in text for mark in marks):
        return 0
    for size in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


class StopScanner:
    """Ends a text before the stop string that is complete first."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.met: str | None = None  # the stop string that ended the text

    @property
    def is_stopped(self) -> bool:
        return self.met is not None

    def push(self, piece: str) -> str:
        if self.is_stopped:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        places = [(text.find(stop), stop) for stop in self._stops if stop in text]
        matches = [(at + len(stop), at) for at, stop in places]
        if matches:
            # The stop string that is complete first counts, and of several, the longest.
            end, at = min(matches)
            self.met = text[at:end]
            return text[:at]
        cut = len(text) - held_back(text, self._stops)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        if self.is_stopped:
            return ""
        text, self._held = self._held, ""
        return text
