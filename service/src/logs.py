"""Logs: lines for people on a terminal, JSON objects elsewhere; both carry the request's id."""

import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import Processor

__all__ = ["configure_logs"]


def configure_logs(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Sends the logs of pykv and of its libraries, and Python's warnings, to `stream`, or to stderr.

    Args:
        level: the least level that is logged, such as "info".
        log_format: "console", "json", or "auto" for console where `stream` is a terminal.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_common(), structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_rendering(log_format, is_terminal=stream.isatty()),
            ],
        )
    )
    number = logging.getLevelNamesMapping()[level.upper()]
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.WARNING))  # what libraries are busy with is no news
    logging.getLogger("pykv").setLevel(number)
    logging.captureWarnings(capture=True)  # else they are plain text amid the lines of JSON
    structlog.configure(
        processors=[*_common(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(number),
    )


def _common() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _rendering(log_format: str, *, is_terminal: bool) -> list[Processor]:
    """Tracebacks stay plain: they must not show the values of variables, which may be prompts."""
    if log_format == "console" or (log_format == "auto" and is_terminal):
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(colors=is_terminal, exception_formatter=plain, sort_keys=False)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
