"""Asks a gateway for a chat's answer, and reads it while it is written.

A model may write control characters, which move a terminal's cursor or set its title and its
clipboard. They are removed here, so they reach neither a terminal nor a pipe: what is piped is
read on a terminal later. Marks of a text's direction stay, as right-to-left texts need them.
"""

import json
import re
import time
from collections.abc import Generator, Iterable, Iterator
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request

from gateway.cli.agents import NO_KEY
from gateway.cli.conversation import Piece
from gateway.cli.gateways import DIRECTLY

HELD = 4096  # most characters of a control sequence that has not ended
RETRY_S = 1.0  # seconds until a model that is being loaded is asked again
# ECMA-48: control strings such as OSC and DCS, control sequences (CSI), and other escapes.
_STRING = r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\n\x07\x1b\x9c]*"
_SEQUENCE = r"(?:\x1b\[|\x9b)[0-?]*[ -/]*"
_CHARACTER = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]"
_CONTROLS = re.compile(
    rf"{_STRING}(?:\x07|\x1b\\|\x9c)|{_SEQUENCE}[@-~]|\x1b[ -/]*[0-OQ-WYZ\\`-~]"
    rf"|(?P<open>(?:{_STRING}\x1b?|{_SEQUENCE}|\x1b[ -/]*)\Z)|{_CHARACTER}"
)


class AnswerFailed(Exception):
    """Raised with the API's message, or with the reason why there is none."""


class Cleaner:
    """Removes control characters from a text that comes in parts, except \\n and \\t.

    A sequence that does not end within its line and HELD characters becomes text, without the
    characters that begin it.
    """

    _held = ""

    def clean(self, text: str, *, is_last: bool = False) -> str:
        def replacement(match: re.Match[str]) -> str:
            if match["open"] and not is_last and len(match[0]) <= HELD:
                self._held = match[0]
                return ""
            return re.sub(_CHARACTER, "", match["open"] or "")

        text, self._held = self._held + text, ""
        return _CONTROLS.sub(replacement, text)


def clean(text: object) -> str:
    return Cleaner().clean(str(text), is_last=True)


def ask(url: str, key: str | None, body: dict[str, Any]) -> Generator[Piece, None, None]:
    """Yield a streamed answer, and wait while its model is loaded. Raises AnswerFailed.

    Closing the generator closes the connection, and so stops the answer.
    """
    headers = {"content-type": "application/json", "authorization": f"Bearer {key or NO_KEY}"}
    data, problem = json.dumps({**body, "stream": True}).encode(), "no longer answers"
    try:
        while True:
            try:
                request = Request(f"{url}/v1/chat/completions", data, headers)
                with DIRECTLY.open(request) as response:
                    problem = "ended in the middle of the answer"
                    yield from read_pieces(response)
                    return
            except HTTPError as error:
                with error:
                    about = json.load(error)["error"]
                if about["code"] != "model_loading":
                    raise AnswerFailed(about["message"]) from None
            time.sleep(RETRY_S)
    except (EOFError, OSError, HTTPException, LookupError, ValueError):
        raise AnswerFailed(f"The gateway at {url} {problem}.") from None


def read_pieces(lines: Iterable[bytes]) -> Iterator[Piece]:
    """Yield the pieces of a stream of events. Raises AnswerFailed; EOFError if its end is missing.

    Thoughts are read by vLLM's newer name, `reasoning`, too.
    """
    text, thoughts = Cleaner(), Cleaner()
    for line in lines:
        if not line.startswith(b"data:"):  # a comment, or the end of an event
            continue
        if line.startswith(b"data: [DONE]"):
            return
        event = json.loads(line.removeprefix(b"data:"))
        if "error" in event:
            raise AnswerFailed(event["error"]["message"])
        for choice in event["choices"]:
            delta, finish = choice["delta"], choice.get("finish_reason")
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            yield Piece(
                text.clean(delta.get("content") or "", is_last=bool(finish)),
                thoughts.clean(thought, is_last=bool(finish)),
                finish,
            )
    raise EOFError
