"""structlog, configured once: an event name and keys, to stderr."""

import json
import logging
import sys
from typing import Any, Literal

import orjson
import structlog

Format = Literal["auto", "json", "console"]


def configure(level: str = "info", style: Format = "auto") -> None:
    """Write lines of `level` and above; `auto` is console on a terminal and JSON elsewhere."""
    as_json = style == "json" or (style == "auto" and not sys.stderr.isatty())
    # Never a frame's variables: they hold keys and prompts.
    plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer(_json) if as_json else plain
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([structlog.processors.format_exc_info] if as_json else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def _json(event: Any, **given: Any) -> str:
    """Write a line's JSON, by orjson; what that refuses (a lone surrogate, a huge number) by json.

    Whatever is said, the line is written.
    """
    try:
        return orjson.dumps(event, default=given["default"]).decode()
    except (TypeError, ValueError):
        return json.dumps(event, default=repr, skipkeys=True)


def get(name: str) -> structlog.typing.FilteringBoundLogger:
    """Give a logger whose lines say which part of the gateway spoke."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(part=name)
    return logger
