"""Builds one outlines_core index. A script: run by path, so that nothing of ours is imported.

stdin: a pickled dict with `kind` (json_schema or regex), `source`, `eos_id`, `texts` (the bytes
of tokens → their ids) and `max_bytes` of memory. stdout: a pickled ("index", bytes) or
("refused", why). outlines_core counts no fuel: whoever runs this sets the clock.
"""

import contextlib
import pickle
import resource
import sys
from typing import Any

from outlines_core import Index, Vocabulary  # type: ignore[import-untyped]
from outlines_core.json_schema import (  # type: ignore[import-untyped]
    build_regex_from_schema,
)


def build_index(request: dict[str, Any]) -> tuple[str, Any]:
    """Compile a schema or a regex against a vocabulary; compact JSON, no white space."""
    try:
        regex = request["source"]
        if request["kind"] == "json_schema":
            regex = build_regex_from_schema(regex, "")
        index = Index(regex, Vocabulary(request["eos_id"], request["texts"]))
    except MemoryError:
        return "refused", f"it needs more than {request['max_bytes']} bytes"
    except (ValueError, TypeError, OverflowError) as error:
        return "refused", str(error)
    return "index", pickle.dumps(index)


def main() -> None:
    """Read the request, bound the memory, write the answer."""
    request = pickle.load(sys.stdin.buffer)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = request["max_bytes"]
    if most == resource.RLIM_INFINITY or limit < most:
        # macOS has the name and not the thing; there only the clock holds.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    pickle.dump(build_index(request), sys.stdout.buffer)


if __name__ == "__main__":
    main()
