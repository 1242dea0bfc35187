"""What callers and checkpoints make costly, run in a process of its own; see serving/sandbox.py.

A script, run by path, so that nothing of ours is imported and never mlx. Its argument is the file
descriptor of a socket, a Connection of multiprocessing: a first answer says that it is ready, then
requests and answers take turns. At the end of file it ends. Its second argument is the kind of
request that it makes ready for.

A request is a dict: `kind`, `processor_s` of processor time after which the kernel ends the process
by SIGPROF, `seconds` after which it does so even if the gateway is gone, `max_bytes` of memory
beyond what it holds at the start, and what the kind needs. An answer
is an outcome, its value, and whether the process has grown so large that another should take its
place.
"""

import contextlib
import functools
import importlib.util
import os
import pickle
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeAlias

Answer: TypeAlias = tuple[str, Any]
Request: TypeAlias = Mapping[str, Any]

# No more than the threads of the gateway have, so that a recursion that survives here does there.
STACK_BYTES: Final = 4 << 20
TRIAL_STEPS: Final = 8
TRIAL_FORCED: Final = 64  # tokens at a step
SPENT_BYTES: Final = 512 << 20  # malloc gives little back
# Of keywords whose value depends on what does not fit, or on what was looked at.
TURNING: Final = ("not", "oneOf", "if", "maxContains", "unevaluatedItems", "unevaluatedProperties")
END: Final = "<|end of the trial|>"


def try_grammar(request: Request) -> Answer:
    """Compile with llguidance for a small tokenizer, and take some steps.

    Only survival counts: the gateway compiles again, with the model's tokenizer, and reports what
    is wrong. `spec` is llguidance's own form; `specials` are the control tokens it names; `limits`
    are those of LLParserLimits.
    """
    from llguidance import LLMatcher, LLParserLimits

    tokenizer, eos = _bytes_tokenizer(request["specials"])
    matcher = LLMatcher(
        tokenizer, request["spec"], log_level=0, limits=LLParserLimits(**request["limits"])
    )
    for _ in range(TRIAL_STEPS):
        if matcher.get_error() or matcher.is_stopped():
            break
        for token in matcher.compute_ff_tokens()[:TRIAL_FORCED]:
            matcher.consume_token(token)
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(eos) if mask[i // 8] >> (i % 8) & 1]
        if not allowed:
            break
        # A quote leads out of strings.
        matcher.consume_token(ord('"') if ord('"') in allowed else allowed[0])
    return "tried", None


@functools.lru_cache(maxsize=8)
def _bytes_tokenizer(specials: tuple[str, ...]) -> tuple[Any, int]:
    """Make a tokenizer of all bytes and these control tokens; with it, its last id, the end."""
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    class Bytes:
        tokens: Final = [*(bytes([i]) for i in range(256)), *(s.encode() for s in (*specials, END))]
        special_token_ids: Final = list(range(256, len(tokens)))
        eos_token_id: Final = len(tokens) - 1
        bos_token_id: Final = None

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    return LLTokenizer(TokenizerWrapper(Bytes())), Bytes.eos_token_id


def render(request: Request) -> Answer:
    """Render a chat template as transformers does.

    `arguments` are those of its `render_jinja_template`, pickled; what is longer than `max_chars`
    is too large.
    """
    try:
        rendered: Any = _renderer()(**pickle.loads(request["arguments"]))
    except MemoryError:
        raise
    except Exception as error:  # a template is a program, and raises whatever it likes
        return "refused", str(error)
    text, most = rendered[0][0], request["max_chars"]
    if len(text) > most:
        return "large", f"it writes {len(text)} characters, and may write {most}"
    return "rendered", text


@functools.cache
def _renderer() -> Callable[..., Any]:
    """Import transformers' `render_jinja_template`, and of transformers little else.

    The packages above it import what no template needs: without running those, it takes a third of
    the time and two thirds of the memory.
    """
    for package in ("transformers", "transformers.utils"):
        if package not in sys.modules and (spec := importlib.util.find_spec(package)):
            sys.modules[package] = importlib.util.module_from_spec(spec)
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def judge(request: Request) -> Answer:
    """Judge whether an answer, JSON, fits a schema, by the rules of a draft of jsonschema_rs's.

    Patterns take linear time; those with look-arounds backtrack, for a limited number of steps. A
    reference that leads out of the schema is never followed, and allows everything: then an answer
    that fits may not fit, and one that doesn't may, if a keyword turns what it allows around.
    """
    import json

    import jsonschema_rs as rs

    schema, answer = json.loads(request["schema"]), json.loads(request["answer"])
    if isinstance(schema, dict):
        schema.pop("$schema", None)
    draft = getattr(rs, request["draft"])
    followed: list[str] = []

    def allow_all(address: str) -> dict[str, object]:
        followed.append(address)
        return {}

    options = (rs.RegexOptions(), rs.FancyRegexOptions(backtrack_limit=100_000))
    for patterns in options:
        try:
            validator = draft(
                schema,
                pattern_options=patterns,
                validate_formats=False,
                retriever=allow_all,
            )
            is_valid = validator.is_valid(answer)
            if followed and (is_valid or any(f'"{name}"' in request["schema"] for name in TURNING)):
                return "refused", f"it leads to {followed[0]}"
            return "judged", is_valid
        except (ValueError, rs.ReferencingError) as error:
            problem = str(error)
    return "refused", problem


KINDS: Final[Mapping[str, Callable[[Request], Answer]]] = {
    "grammar": try_grammar,
    "template": render,
    "answer": judge,
}
READY: Final[Mapping[str, Callable[[], Answer]]] = {
    "grammar": lambda: try_grammar({"spec": "start: /a+/", "specials": (), "limits": {}}),
    "template": lambda: render(
        {
            "arguments": pickle.dumps({"conversations": [[]], "chat_template": ""}),
            "max_chars": 0,
        }
    ),
}


class Served:
    """One end of the socket, and the bounds of this process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._base_bytes = _address_space_bytes()
        _, self._most = resource.getrlimit(resource.RLIMIT_AS)

    def serve(self, kind: str) -> None:
        """Warm up for requests of `kind`, then answer requests until the other end closes."""
        READY[kind]()
        self._base_bytes = _address_space_bytes()
        self._send(("ready", None))
        while True:
            try:
                request = self._connection.recv()
            except EOFError:
                return
            signal.setitimer(signal.ITIMER_REAL, request["seconds"])
            signal.setitimer(signal.ITIMER_PROF, request["processor_s"])
            self._bound(request["max_bytes"])
            try:
                answer = KINDS[request["kind"]](request)
            except MemoryError:
                answer = "large", "it needs more memory than it may have"
            except Exception as error:
                answer = "refused", f"{type(error).__name__}: {error}"
            del request
            self._send(answer)
            for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
                signal.setitimer(timer, 0)

    def _bound(self, max_bytes: int) -> None:
        """Bound the address space. macOS takes the call and does nothing: there the gateway looks
        at resident memory now and then.
        """
        limit = self._base_bytes + max_bytes
        if self._most != resource.RLIM_INFINITY:
            limit = min(limit, self._most)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (limit, self._most))

    def _send(self, answer: Answer) -> None:
        self._connection.send((*answer, _most_resident_bytes() > SPENT_BYTES))


def _address_space_bytes() -> int:
    """Count the address space in use; 0 if /proc does not give it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return 1 << 30
    return pages * resource.getpagesize()


def _most_resident_bytes() -> int:
    """Count the most memory this process has held. Linux's getrusage has the gateway's own too, as
    it was when it spawned this one.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def main() -> None:
    """Serve on a thread of the right stack, until the gateway is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are the gateway's to answer
    with contextlib.suppress(OSError):  # Linux: should memory end, this process goes first
        Path("/proc/self/oom_score_adj").write_text("1000")
    served = Served(Connection(int(sys.argv[1])))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=served.serve, args=(sys.argv[2],))
    thread.start()
    thread.join()
    os._exit(0)


if __name__ == "__main__":
    main()
