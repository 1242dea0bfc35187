"""Configures structlog, which writes each event to stderr as JSON or as text for a console.

In both formats, a caller's text cannot begin a line or move the cursor.
"""

import json
import logging
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Literal

import orjson
import structlog

Format = Literal["auto", "json", "console"]

COLUMNS = 100
FIELD_COLUMNS = 48  # most columns of one field
ID_COLUMNS = 13

lost_lines = 0  # lines that could not be written


def configure(level: str = "info", style: Format = "auto") -> None:
    """Log events of `level` and above; `auto` is console on a terminal, else JSON."""
    as_json = style == "json" or (style == "auto" and not sys.stderr.isatty())
    stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
    render: structlog.typing.Processor = _console
    if as_json:
        stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
        render = structlog.processors.JSONRenderer(_json)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            stamp,
            structlog.processors.StackInfoRenderer(),
            # Tracebacks leave out local variables, which may hold API keys and prompts.
            structlog.processors.format_exc_info,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        # A bar replaces sys.stderr meanwhile, so that lines appear above it.
        logger_factory=lambda *_: _Writer(sys.stderr),
        cache_logger_on_first_use=False,
    )


class _Writer(structlog.WriteLogger):
    """Writes each line in one call, and counts lines that fail instead of raising an error."""

    def msg(self, message: str) -> None:
        global lost_lines
        try:
            super().msg(message)
        except (OSError, ValueError):  # ValueError: the file is closed
            lost_lines += 1

    log = debug = info = warn = warning = error = err = msg
    critical = fatal = exception = failure = msg


def _json(event: Any, **options: Any) -> str:
    """Return an event as one line of JSON.

    orjson does not escape U+0085, U+009B and U+2028, which may end a line or move the cursor.
    """
    try:
        line = orjson.dumps(event, default=options["default"]).decode()
    except (TypeError, ValueError):
        return json.dumps(event, default=repr, skipkeys=True)
    if line.isprintable():
        return line
    return _escape(line, lambda character: json.dumps(character)[1:-1])


def get(name: str) -> structlog.typing.FilteringBoundLogger:
    """Return the logger of a part of the gateway."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(part=name)
    return logger


def is_console(style: Format) -> bool:
    return sys.stderr.isatty() and style != "json"


def _console(_: Any, __: str, event_fields: MutableMapping[str, Any]) -> str:
    """Return an event as text, cut to COLUMNS unless it is a warning, an error or a prompt."""
    fields = dict(event_fields)
    event, level = one_line(fields.pop("event", "")), fields.pop("level", "info")
    time, request_id = fields.pop("timestamp", ""), fields.pop("request_id", None)
    below = [fields.pop(key, None) for key in ("exception", "stack")]
    fields.pop("part", None)
    if event == "request":
        words = list(_take_request(fields))
    else:
        words = [f"{level}: {event}".removeprefix("info: ")]
    columns = None
    if level in ("info", "debug") and event != "prompt":
        columns = FIELD_COLUMNS
    words.append(time)
    if request_id is not None:
        words.append(fit(one_line(request_id), ID_COLUMNS))
    line = " ".join([*words, *_format_fields(fields, columns)])
    lines = [fit(line, COLUMNS)]
    if columns is None:
        lines = list(_wrap(line))
    for text in filter(None, below):  # indented, so that only events begin a line
        lines += [f"    {one_line(row)}" for row in str(text).splitlines()]
    return "\n".join(lines)


def _take_request(fields: dict[str, Any]) -> Iterator[str]:
    yield _word(fields.pop("method", ""), 10)
    yield _word(fields.pop("path", ""), FIELD_COLUMNS)
    yield one_line(fields.pop("status", ""))
    ms = fields.pop("ms", 0.0)
    yield f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.1f} ms"
    if "model" in fields:
        yield _word(fields.pop("model"), 24)
        yield f"{fields.pop('tokens_in', 0)}+{fields.pop('tokens_out', 0)} tokens"


def _format_fields(fields: dict[str, Any], columns: int | None) -> Iterator[str]:
    for key, value in fields.items():
        if (key == "bytes" or key.endswith("_bytes")) and isinstance(value, int):
            text = human_bytes(value)
        elif key == "seconds":
            text = f"{value} s"
        else:
            text = _word(value, columns)
        if key in ("bytes", "seconds"):  # the unit makes the key superfluous
            yield text
        else:
            yield f"{one_line(key)}={text}"


def human_bytes(count: int) -> str:
    size, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    if units[0] == "GiB":
        return f"{size:.1f} GiB"
    return f"{size:.0f} {units[0]}"


def fit(text: str, columns: int) -> str:
    """Return a text cut to `columns`; a cut text ends in an ellipsis."""
    if len(text) <= columns and _width(text) <= columns:
        return text
    parts, used = [], 0
    for letter in text[:columns]:
        used += _width(letter)
        if used > columns - 1:
            break
        parts.append(letter)
    return "".join(parts) + "…"


def _wrap(line: str) -> Iterator[str]:
    """Split a line, at spaces where possible, and indent all parts but the first."""
    indent, left = "", line
    while _width(indent + left) > COLUMNS:
        part = fit(left, COLUMNS - len(indent) + 1)[:-1]
        at = part.rfind(" ")
        if at >= COLUMNS // 2:
            part = part[: at + 1]
        yield indent + part.rstrip(" ")
        indent, left = "    ", left[len(part) :]
    yield indent + left


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    letters = [character for character in text if not unicodedata.combining(character)]
    # Some letters, such as Chinese ones, take two columns.
    wide = [character for character in letters if unicodedata.east_asian_width(character) in "WF"]
    return len(letters) + len(wide)


def _word(value: Any, columns: int | None = None) -> str:
    text = one_line(value)
    is_quoted = isinstance(value, str) and (not text or any(mark in text for mark in ' "='))
    if columns is not None:
        text = fit(text, columns - 2 * is_quoted)
    if is_quoted:
        return '"' + text.replace('"', "'") + '"'
    return text


def one_line(value: Any) -> str:
    """Return any value as one line of text, with control characters escaped."""
    if isinstance(value, Mapping):
        text = ",".join(f"{one_line(key)}:{one_line(value[key])}" for key in value)
    else:
        text = str(value) if isinstance(value, str | int | float) else repr(value)
    if text.isprintable():
        return text
    return _escape(text, lambda character: character.encode("unicode_escape").decode())


def _escape(text: str, escape: Callable[[str], str]) -> str:
    special = {character for character in text if not character.isprintable()}
    return text.translate({ord(character): escape(character) for character in special})
