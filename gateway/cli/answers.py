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
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request

from gateway.cli.agents import NO_KEY
from gateway.cli.gateways import DIRECTLY

RETRY_S = 1.0  # seconds until a model that is being loaded is asked again
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

# Raised by reading JSON that is not the gateway's.
_FOREIGN = (AttributeError, LookupError, TypeError, ValueError)


class Refused(Exception):
    """Raised if something cannot be done as it was asked. The message gives the reason."""


class Piece(NamedTuple):
    """New text of an answer, without control characters."""

    text: str = ""
    thoughts: str = ""


def clean(text: object) -> str:
    """Return a text without its control characters, except \\n and \\t."""
    return _CONTROLS.sub("", str(text))


def ask(url: str, key: str | None, body: dict[str, Any]) -> Generator[Piece, None, None]:
    """Yield a streamed answer, and wait while its model is loaded. Raises Refused.

    Closing the generator closes the connection, and so stops the answer.
    """
    headers = {"content-type": "application/json", "authorization": f"Bearer {key or NO_KEY}"}
    data = json.dumps({**body, "stream": True}).encode()
    request = Request(f"{url}/v1/chat/completions", data, headers)
    try:
        while True:
            try:
                with DIRECTLY.open(request) as response:
                    yield from read_pieces(response)
                    return
            except HTTPError as error:
                with error:
                    code, message = _read_error(error.read())
                if code != "model_loading":
                    problem = f"{url} answered with status {error.code}, and no reason."
                    raise Refused(message or problem) from None
            time.sleep(RETRY_S)
    except (EOFError, OSError, HTTPException):
        raise Refused(f"The gateway at {url} ended before the answer did.") from None
    except _FOREIGN:
        raise Refused(f"{url} sent an event that is no part of an answer.") from None


def _read_error(body: bytes) -> tuple[str | None, str | None]:
    """Return an error's code and message; None of what a proxy, say, has not written."""
    try:
        about = json.loads(body)["error"]
        return about["code"], about["message"]
    except _FOREIGN:
        return None, None


def read_pieces(lines: Iterable[bytes]) -> Iterator[Piece]:
    """Yield the pieces of a stream of events.

    Raises Refused, also for an answer that is not whole, and EOFError if the stream's end is
    missing.
    """
    for line in lines:
        if not line.startswith(b"data:"):  # a comment, or the end of an event
            continue
        if line.startswith(b"data: [DONE]"):
            return
        event = json.loads(line.removeprefix(b"data:"))
        if "error" in event:
            raise Refused(event["error"]["message"])
        for choice in event["choices"]:
            texts = (choice["delta"].get(name) for name in ("content", "reasoning_content"))
            yield Piece(*(clean(text or "") for text in texts))
            if choice.get("finish_reason") not in (None, "stop"):
                raise Refused(f"The answer is not whole ({choice['finish_reason']}).")
    raise EOFError
