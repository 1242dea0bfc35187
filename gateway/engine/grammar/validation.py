"""Whether an answer fits the caller's schema, where its grammar could not hold all of that."""

import json
from typing import Any, Final

from gateway.engine import sandboxed
from gateway.engine.grammar.drafts import Draft, draft_of
from gateway.engine.grammar.trial import Sandbox, key_of

_MAX_BYTES: Final = 1 << 29
_VALIDATORS: Final = {
    Draft.D4: "Draft4Validator",
    Draft.D6: "Draft6Validator",
    Draft.D7: "Draft7Validator",
    Draft.D2019: "Draft201909Validator",
    Draft.D2020: "Draft202012Validator",
}


def fits(source: str, answer: str, sandbox: Sandbox | None) -> bool | None:
    """Judge an answer by a schema, both JSON; None where nobody can.

    In the sandbox, where there is one: a schema of a caller's may take any time.
    """
    try:
        json.loads(answer)
    except (ValueError, RecursionError):
        return False  # cut off, say
    request: dict[str, Any] = {
        "kind": "answer",
        "schema": source,
        "answer": answer,
        "draft": _VALIDATORS[draft_of(json.loads(source))],
        "max_bytes": _MAX_BYTES,
    }
    if sandbox is None:
        outcome, value = sandboxed.judge(request)
    else:
        outcome, value = sandbox(request, key_of("answer", source))
    return bool(value) if outcome == "judged" else None
