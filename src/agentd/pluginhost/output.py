"""The output of plugins, logged under their names at a limited rate."""

from __future__ import annotations

import asyncio
import time
from typing import IO

import structlog

log = structlog.get_logger()

MAX_TEXT = 500
_MAX_LINE = 2000
_CHUNK = 64 * 1024
_MAX_LINES, _WINDOW_S = 50, 10.0
"""Lines of one plugin that are logged in a window of time; further ones are counted."""
_FLOOD_PAUSE_S = 0.002
"""Pause between two reads of a plugin that prints too much."""
_LAST_OUTPUT_S = 0.2
"""Time to read what an ended process printed last."""


def one_line(text: str, max_length: int = MAX_TEXT) -> str:
    """Return foreign text as one printable line of limited length."""
    line = " ".join(text[: 4 * max_length].split())
    text = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


class PluginOutput:
    """Logs the output of one process."""

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self._name = name
        self._window_end = 0.0
        self._lines = 0
        self._task = asyncio.create_task(self._read_lines(file), name=f"plugin-output-{name}")

    async def _read_lines(self, file: IO[bytes]) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), file
        )
        unread = b""
        try:
            while chunk := await reader.read(_CHUNK):
                *lines, unread = (unread + chunk).split(b"\n")
                if len(unread) > _MAX_LINE:
                    lines, unread = [*lines, unread], b""
                for line in lines:
                    self._log(line)
                if self._lines > _MAX_LINES:
                    await asyncio.sleep(_FLOOD_PAUSE_S)
            self._log(unread)
        finally:
            transport.close()

    def _log(self, line: bytes) -> None:
        now = time.monotonic()
        if now >= self._window_end:
            if (dropped := self._lines - _MAX_LINES) > 0:
                log.warning("plugin.output_dropped", plugin=self._name, lines=dropped)
            self._window_end, self._lines = now + _WINDOW_S, 0
        self._lines += 1
        if self._lines > _MAX_LINES:
            return
        if text := one_line(line[:_MAX_LINE].decode(errors="replace"), _MAX_LINE):
            log.info("plugin.log", plugin=self._name, text=text)

    async def close(self) -> None:
        """Log the last output of an ended process; others may still hold its pipe."""
        await asyncio.wait([self._task], timeout=_LAST_OUTPUT_S)
        self._task.cancel()
