"""Removed kernels in order of creation: one JSON line each, the latest `MOST_KEPT`.

A page of a list may start after a removed kernel, before and after a restart. Nothing else depends
on this file: a line that cannot be written or read is skipped.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec

from agentd.core.kernel.states import RemovedKernel

MOST_KEPT = 16_384
_MOST_BYTES = 8 << 20
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LINE = msgspec.json.Decoder(RemovedKernel)


class RemovedKernelsFile:
    """The file of removed kernels."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = 0

    def load(self) -> list[RemovedKernel]:
        """Return the latest removed kernels, oldest first."""
        found = deque[RemovedKernel](maxlen=MOST_KEPT)
        lines = self._read().splitlines()
        for line in lines:
            with suppress(msgspec.MsgspecError):
                found.append(_LINE.decode(line))
        self._lines = len(lines)
        return list(found)

    def add(self, kernel: RemovedKernel) -> None:
        """Append a removed kernel; a file of twice `MOST_KEPT` lines is cut first."""
        line = msgspec.json.encode(kernel) + b"\n"
        with suppress(OSError):
            if self._lines >= 2 * MOST_KEPT:
                self._cut()
            self._write(self._path, line, os.O_APPEND)
            self._lines += 1

    def _cut(self) -> None:
        kept = self.load()
        temporary = self._path.with_name(f".{self._path.name}.new")
        self._write(temporary, b"".join(msgspec.json.encode(k) + b"\n" for k in kept), os.O_TRUNC)
        temporary.replace(self._path)
        self._lines = len(kept)

    def _read(self) -> bytes:
        with suppress(OSError), open(self._path, "rb", opener=_opened) as file:
            about = os.fstat(file.fileno())
            if stat.S_ISREG(about.st_mode):
                file.seek(max(0, about.st_size - _MOST_BYTES))
                return file.read(_MOST_BYTES)
        return b""

    def _write(self, path: Path, content: bytes, how: int) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | how | _FLAGS, 0o600)
        with open(descriptor, "wb", buffering=0) as file:  # noqa: PTH123 - a descriptor
            file.write(content)


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | _FLAGS)
