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
    is_default: bool
    """It asked for variables, and none of them is set."""


def expand(text: str, variables: Mapping[str, str]) -> Expansion:
    """Put variables into a text; raises ExpansionInvalid naming what is wrong."""
    asked: list[str] = []
    is_any_set = False

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
        nonlocal is_any_set
        if match["fallback"]:
            is_any_set = is_any_set or bool(variables.get(name))
            return variables.get(name) or match["default"]
        if name not in variables:
            hint = did_you_mean(nearest(name, variables))
            raise ExpansionInvalid(f"${{{name}}} is not set and has no default{hint}")
        is_any_set = True
        return variables[name]

    expanded = _PART.sub(value, text)
    return Expansion(expanded, tuple(asked), bool(asked) and not is_any_set)
