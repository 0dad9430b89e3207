"""Standard error of a program that outlives the reader of its log.

A write never raises, and waits at most `WRITE_TIMEOUT_MS` for a slow reader. What cannot be written
is lost and counted.
"""

from __future__ import annotations

import io
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

WRITE_TIMEOUT_MS = 50
"""Milliseconds to wait for a pipe, socket or terminal that is full."""
SKIP_WAIT_S = 1.0
"""Seconds after a loss without any wait: a stopped reader costs `WRITE_TIMEOUT_MS` once."""
WARN_S = 3600.0
"""Seconds that a warning stays after the last loss."""
REMEDY = "free its disk, or restart its reader and agentd"
NO_READER = "its reader does not read"


class LostLines:
    """The lines of a log that could not be written."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = 0
        self._clock = clock
        self._unreported = 0
        self._is_writable = True
        self._reason = ""
        self._lost_at = float("-inf")

    def add(self, lines: int, reason: str) -> None:
        """Count lost lines."""
        self.total += lines
        self._unreported += lines
        self._is_writable = False
        self._reason = reason
        self._lost_at = self._clock()

    def mark_writable(self) -> None:
        """Note that a line was written."""
        self._is_writable = True

    def lost_within(self, seconds: float) -> bool:
        """Return whether a line was lost within the last `seconds`."""
        return self._clock() - self._lost_at < seconds

    def report(self, write: Callable[[int, str], None], *, is_attempt: bool = False) -> None:
        """Write how many lines were lost, and why, once the log is writable again.

        An attempt finds out whether it is. One that fails does not count as a lost line.
        """
        if not self._unreported or not (self._is_writable or is_attempt):
            return
        lines, self._unreported = self._unreported, 0
        total = self.total
        write(lines, self._reason)
        if not self._is_writable:
            self._unreported += lines
            if is_attempt:
                self._unreported, self.total = lines, total

    def problems(self) -> list[tuple[str, str]]:
        """Return the reason and the remedy while the log is not writable, and `WARN_S` longer.

        The reason is the same as long as the problem is; the number of lines is in the remedy.
        """
        lines = f"lines lost since the start: {self.total}"
        if not self._is_writable:
            return [(f"the log cannot be written: {self._reason}", f"{REMEDY}; {lines}")]
        if self.lost_within(WARN_S):
            return [(f"the log could not be written: {self._reason}", lines)]
        return []


LOST = LostLines()
"""Those of this process."""


class Stderr(io.RawIOBase):
    """A descriptor whose writes never raise; see the module."""

    def __init__(self, descriptor: int, lost: LostLines) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lost = lost
        self._is_line_cut = False
        """Whether the last line was written in part."""
        self._lock = threading.RLock()  # a finalizer may write during a write

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        content = bytes(data)
        try:
            with self._lock:
                self._write(b"\n" + content if self._is_line_cut else content)
        except OSError as error:
            self._lost.add(max(1, content.count(b"\n")), error.strerror or str(error))
        else:
            self._lost.mark_writable()
        return len(content)

    def _write(self, content: bytes) -> None:
        """Write in parts that a pipe with any space takes whole: poll(2) promises no more."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        while content:
            is_patient = not self._lost.lost_within(SKIP_WAIT_S)
            if not poll.poll(WRITE_TIMEOUT_MS if is_patient else 0):
                raise OSError(0, NO_READER)
            content = content[os.write(self._descriptor, content[: select.PIPE_BUF]) :]
            self._is_line_cut = bool(content)


def guard() -> None:
    """Make `sys.stderr` safe to write to, for this program and its libraries."""
    if sys.stderr is None:  # closed by the caller: no other file may get its number
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    raw = Stderr(2, LOST)
    sys.stderr = io.TextIOWrapper(raw, "utf-8", errors="backslashreplace", line_buffering=True)
