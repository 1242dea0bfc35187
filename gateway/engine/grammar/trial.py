"""A grammar is compiled in a sandbox first: what ends a process there never reaches this one.

Static bounds keep out what is known to overflow or explode; this is for what is not known yet.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from gateway.errors import BadRequest, Overloaded, Unavailable

Sandbox: TypeAlias = Callable[[Mapping[str, Any], bytes], tuple[str, Any]]
"""Does a request of engine/sandboxed.py, unless one of that key has ended a process, and returns an
outcome and its value: one of its kind, or large, busy, slow, late, died or killed with a reason.
"""

# Bounds of llguidance's parser, here and there.
LIMITS: Final[Mapping[str, Any]] = {"max_lexer_states": 50_000, "verbose_errors": False}
# Texts, regexes, which may go over lines, and comments. What has no end matches
# as far as it goes: a search that failed would begin again at each quote in it, and holds
# the GIL all that time.
LARK_TEXT: Final = re.compile(
    r'(?:"(?:\\.|[^"\\\n])*(?P<text>")?|/(?!/)(?:\\.|[^/\\])*(?P<regex>/)?)|//[^\n]*|#[^\n]*'
)
_SPECIAL: Final = re.compile(r"<[^<>\s\[\]]+>")
_MAX_BYTES: Final = 1 << 30  # what llguidance's limits let grow was at most 0.13 GB
BUSY_S: Final = 2.0


class DiedCompiling(BadRequest):
    """A grammar that ended the process that compiled it: a wider form of it is not tried."""


def without_texts(source: str) -> str:
    """Return a grammar without its texts, regexes and comments."""
    return LARK_TEXT.sub(lambda found: found[0] if is_open(found) else '""', source)


def is_open(found: re.Match[str]) -> bool:
    """Return True for a text or a regex without its end."""
    return not (found["text"] or found["regex"] or found[0].startswith(("//", "#")))


def try_grammar(sandbox: Sandbox, spec: str, code: str) -> None:
    """Compile llguidance's own form of a grammar in the sandbox.

    Raises BadRequest with `code` when that ended the process, TimeoutError when it takes too much
    processor time, Overloaded when other grammars leave none, and Unavailable when other work
    leaves it no processor or memory.
    """
    specials = tuple(sorted(set(_SPECIAL.findall(without_texts(spec)))))
    request: dict[str, Any] = {"spec": spec, "specials": specials, "limits": dict(LIMITS)}
    request |= {"kind": "grammar", "max_bytes": _MAX_BYTES}
    outcome, value = sandbox(request, key_of("grammar", spec))
    check_survived(outcome, value, code)


def check_survived(outcome: str, value: Any, code: str) -> None:
    """Raise for what the sandbox did not live through."""
    if outcome in ("died", "large"):
        noun = "JSON Schema" if code == "invalid_json_schema" else "grammar"
        raise DiedCompiling(
            f"The {noun} cannot be compiled: {value}.", part="answer_form", code=code
        )
    if outcome == "late":
        raise TimeoutError
    if outcome in ("killed", "slow"):
        raise Unavailable(f"The grammar was not compiled: {value}.", retry_after_s=BUSY_S)
    if outcome == "busy":
        raise Overloaded("Other grammars are being compiled; ask again.", retry_after_s=BUSY_S)


def key_of(*parts: str) -> bytes:
    """Make the key that the sandbox remembers a request by."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part.encode(errors="surrogatepass")).digest())
    return whole.digest()
