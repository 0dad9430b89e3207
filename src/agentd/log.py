"""Logging: JSON lines under systemd, readable lines on a terminal; always on stderr."""

from __future__ import annotations

import logging
import os
import sys

import structlog


def configure(level: str = "info") -> None:
    """Set structlog up for this process; `level` is a name of the standard library's."""
    is_terminal = sys.stderr.isatty() and "JOURNAL_STREAM" not in os.environ
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if is_terminal:
        processors.append(
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        )
    else:
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
