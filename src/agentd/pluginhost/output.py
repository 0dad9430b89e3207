"""The output of plugins, logged under their names at a limited rate.

Further lines are only counted, and read slowly.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import IO

import structlog

log = structlog.get_logger()

MAX_TEXT = 500
_MAX_LINE = 2000
_LINES_AT_ONCE, _QUIET_S = 50, 10.0
_FLOOD_PAUSE_S = 0.002
_LAST_READS = 16


def one_line(text: str, longest: int = MAX_TEXT) -> str:
    """Return foreign text as one printable line of limited length."""
    line = " ".join(text[: 4 * longest].split())
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


class PluginOutput:
    """Follows the output of one process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._file: IO[bytes] | None = None
        self._rest = b""
        self._window_end = 0.0
        self._lines = 0

    def follow(self, file: IO[bytes]) -> None:
        """Start reading."""
        os.set_blocking(file.fileno(), False)
        self._file = file
        asyncio.get_running_loop().add_reader(file, self._readable)

    def _readable(self) -> bool:
        """Read available output; return False if there is none or at the end."""
        if self._file is None:
            return False
        try:
            chunk = os.read(self._file.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if chunk and self._is_flood:
            self._lines += chunk.count(b"\n")
            self._pause()
            return True
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _MAX_LINE or not chunk:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._say(line)
        if not chunk:
            self._let_go()
        return bool(chunk)

    @property
    def _is_flood(self) -> bool:
        return self._lines > _LINES_AT_ONCE and time.monotonic() < self._window_end

    def _pause(self) -> None:
        loop = asyncio.get_running_loop()
        if self._file is not None:
            loop.remove_reader(self._file)
            loop.call_later(_FLOOD_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        if self._file is not None:
            asyncio.get_running_loop().add_reader(self._file, self._readable)

    def _say(self, line: bytes) -> None:
        now = time.monotonic()
        if now >= self._window_end:
            if (more := self._lines - _LINES_AT_ONCE) > 0:
                log.warning("plugin.output_dropped", plugin=self._name, lines=more)
            self._window_end, self._lines = now + _QUIET_S, 0
        self._lines += 1
        text = one_line(line[:_MAX_LINE].decode(errors="replace"), _MAX_LINE)
        if text and self._lines <= _LINES_AT_ONCE:
            log.info("plugin.log", plugin=self._name, text=text)

    def close(self) -> None:
        """Read a bounded part of the remaining output, and stop."""
        for _ in range(_LAST_READS):
            if not self._readable():
                break
        self._let_go()

    def _let_go(self) -> None:
        if self._file is not None:
            asyncio.get_running_loop().remove_reader(self._file)
            self._file.close()
            self._file = None
