"""Logging: fields in systemd's journal, JSON lines elsewhere, readable lines on a terminal.

Everything goes to stderr. If that is the journal (`JOURNAL_STREAM`, systemd.exec(5)), each event is
sent to journald itself, with its own fields: `journalctl AGENTD_KERNEL=k1` selects the events of a
kernel, `journalctl -u agentd -p warning` those for the operator.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from agentd.stderr import LOST, NO_READER

log = structlog.get_logger()

_JOURNAL = "/run/systemd/journal/socket"
_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
"""Levels as numbers of syslog(3)."""
_FIELDS = {"kernel_id": "AGENTD_KERNEL", "agent_id": "AGENTD_AGENT", "event": "AGENTD_EVENT"}
_MAX_BYTES = 100_000
"""Maximum bytes of one datagram, well below the limit of a unix socket."""
_LEVELS = {name: int(getattr(logging, name.upper())) for name in _PRIORITIES}
_level = logging.INFO


def set_level(level: str) -> None:
    """Set the minimum level, a name of the standard library's."""
    global _level  # noqa: PLW0603 - one log for the process
    _level = int(getattr(logging, level.upper()))


def configure(level: str = "info") -> None:
    """Configure structlog for this process.

    Logging never raises: what cannot be written is counted (`agentd.stderr`).
    """
    set_level(level)
    write: Callable[[Any], object] = _write_stderr
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    if _is_journal(os.environ.get("JOURNAL_STREAM", "")):
        renderers: list[Any] = [structlog.processors.format_exc_info, journal_entry]
        write = Journal().send
    elif sys.stderr.isatty() and "JOURNAL_STREAM" not in os.environ:
        plain = structlog.dev.plain_traceback
        renderers = [stamp, structlog.dev.ConsoleRenderer(exception_formatter=plain)]
    else:
        render_json = structlog.processors.JSONRenderer()
        renderers = [stamp, structlog.processors.format_exc_info, render_json]
    sink = _Sink(renderers, write)
    structlog.configure(
        processors=[_filter_level, structlog.processors.add_log_level],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=lambda *_: sink,
        cache_logger_on_first_use=True,
    )


class _Sink:
    """Renders and writes events; one that fails is a lost line."""

    def __init__(self, renderers: Sequence[Any], write: Callable[[Any], object]) -> None:
        self._renderers = renderers
        self._write = write

    def msg(self, **event: Any) -> None:
        """Write an event."""
        name, level = event["event"], event["level"]
        rendered: Any = event
        try:
            for render in self._renderers:
                rendered = render(None, level, rendered)
            self._write(rendered)
        except Exception as error:  # noqa: BLE001 - the caller must not fail with its log
            LOST.add(1, f"{name}: {type(error).__name__}")
        LOST.report(_report_lost)

    debug = info = warning = error = critical = msg


def report_lost_lines() -> None:
    """Report the lines that were lost if the log can be written again, also without an event."""
    LOST.report(_report_lost, is_attempt=True)


def _report_lost(lines: int, reason: str) -> None:
    log.error("log.lines_lost", lines=lines, reason=reason)


def _write_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _filter_level(
    _: object, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    if _LEVELS.get(method, logging.INFO) < _level:
        raise structlog.DropEvent
    return event


def _is_journal(stream: str) -> bool:
    """Return whether systemd has connected stderr to the journal."""
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return stream == f"{status.st_dev}:{status.st_ino}"


def journal_entry(_: object, method: str, event: structlog.typing.EventDict) -> dict[str, str]:
    """Return an event as fields of the journal (systemd.journal-fields(7))."""
    level = str(event.pop("level", method))
    words = [f"{name}={value}" for name, value in event.items() if name != "event"]
    fields = {
        "MESSAGE": " ".join([str(event.get("event", "")), *words]),
        "PRIORITY": str(_PRIORITIES.get(level, 6)),
        "SYSLOG_IDENTIFIER": "agentd",
    }
    for name, value in event.items():
        fields[_FIELDS.get(name, f"AGENTD_{name.upper()}")] = str(value)
    return fields


class Journal:
    """Sends entries to journald, each as one datagram of its native protocol."""

    def __init__(self, path: str = _JOURNAL) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def send(self, fields: Mapping[str, str]) -> None:
        """Send one entry; if that fails, print its message to stderr."""
        try:
            self._socket.sendto(encode_entry(fields), self._path)
        except BlockingIOError:
            LOST.add(1, NO_READER)  # journald is busy: the daemon must not wait for it
        except OSError:
            _write_stderr(fields["MESSAGE"])  # the log of last resort
        else:
            LOST.mark_writable()


def encode_entry(fields: Mapping[str, str]) -> bytes:
    """Encode fields in journald's native protocol: each value after its length."""
    limit = _MAX_BYTES // max(1, len(fields))
    parts = []
    for name, value in fields.items():
        raw = value.encode(errors="replace")[: max(limit, 1000)]
        parts.append(name.encode() + b"\n" + len(raw).to_bytes(8, "little") + raw + b"\n")
    return b"".join(parts)
