"""The sandbox as the gateway starts it."""

import json
import sys
from typing import Any

from gateway.engine import sandbox_worker
from gateway.serving.sandbox import Sandbox

SLOW = "{% for a in range(20000) %}{% for b in range(20000) %}{% endfor %}{% endfor %}"


def sandbox(kind: str, timeout_s: float = 30.0, *, wait_s: float = 900.0, **given: Any) -> Sandbox:
    """Make one that is started by its first call, if it isn't entered.

    It waits for the processor time of its work however busy the machine is with other tests.
    """
    command = (sys.executable, "-P", sandbox_worker.__file__, kind)
    return Sandbox(command, timeout_s=timeout_s, wait_s=wait_s, **given)


def template(source: str, **more: Any) -> dict[str, Any]:
    """Ask for a template without messages to be rendered with arguments."""
    arguments = {"conversations": [[]], "chat_template": source, **more}
    return {
        "kind": "template",
        "arguments": json.dumps(arguments),
        "max_chars": 3_000_000,
        "max_bytes": 1 << 29,
    }


def grammar(spec: str) -> dict[str, Any]:
    """Ask for a grammar in llguidance's own form to be tried."""
    return {"kind": "grammar", "spec": spec, "specials": (), "limits": {}, "max_bytes": 1 << 30}
