"""`${VAR:-default}` in a value: the process environment and .env can steer the file.

`$$` writes a dollar sign. As in a shell, a variable set to nothing counts as unset.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.registry.names import did_you_mean, nearest

_PART = re.compile(
    r"\$\$|\$\{(?P<name>[A-Za-z_]\w*)(?P<fallback>:-(?P<default>[^{}]*))?\}|(?P<broken>\$\{)"
)


class ExpansionInvalid(ValueError):
    """A variable that is not set, or braces that do not close."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """A value after expansion, and the variables it asked for (none: it was literal)."""

    text: str
    variables: tuple[str, ...]


def expand(text: str, variables: Mapping[str, str]) -> Expansion:
    """Put variables into a text; raises ExpansionInvalid naming what is wrong."""
    asked: list[str] = []

    def value(match: re.Match[str]) -> str:
        if match["broken"]:
            written = text[match.start() :].partition("\n")[0][:40]
            raise ExpansionInvalid(
                f"{written!r} is not ${{VAR}} or ${{VAR:-default}} (braces do not nest; "
                "$$ writes a dollar sign)"
            )
        if not (name := match["name"]):
            return "$"
        asked.append(name)
        if match["fallback"]:
            return variables.get(name) or match["default"]
        if name not in variables:
            hint = did_you_mean(nearest(name, variables))
            raise ExpansionInvalid(f"${{{name}}} is not set and has no default{hint}")
        return variables[name]

    return Expansion(_PART.sub(value, text), tuple(asked))
