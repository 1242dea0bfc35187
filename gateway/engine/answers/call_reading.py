"""The text of tool calls → calls, by position: the parts that all families share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]  # of each function's arguments, by its name
Call = Mapping[str, Any]  # "name", "arguments" and, where the model makes one, "id"


class Unfinished(ValueError):
    """Raised for a text that ends before its call does."""


# Reads one body of calls (a JSON object or list, say) at a place of a text, given the functions
# and the marks that may close it → its calls, and the place where it ends. Raises Unfinished, or
# ValueError if no call begins there.
ReadBody = Callable[[str, int, Schemas, Sequence[str]], tuple[list[Call], int]]
