"""Reading of regular files at paths that other users control.

Opening a FIFO or a device can block forever, and a read can exhaust the memory. Here the open does
not block, and anything but a regular file of limited size is refused.
"""

from __future__ import annotations

import codecs
import os
import stat
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from agentd.concurrency import Walk, call_in_time
from agentd.os_errors import can_pass

MAX_BYTES = 1 << 20
_UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFREG: "a regular file",
}


def kind_of(mode: int) -> str:
    """Return the kind of a file with its article, from its mode (stat(2))."""
    return _KINDS.get(stat.S_IFMT(mode), "something else")


class UnusableFile(ValueError):
    """A file cannot be read; the message has the reason without the path."""


class MissingFile(UnusableFile):
    """The file does not exist."""


class SilentFile(UnusableFile):
    """The file cannot be read for now: its file system fails, or the host lacks a resource."""


class RegularFile(msgspec.Struct, frozen=True):
    """The content of a regular file, its mode, the id of its owner, and its path without links."""

    content: bytes
    mode: int
    owner: int
    real_path: str

    @property
    def text(self) -> str:
        """The content as text without a byte order mark, which editors of Windows write.

        Raises:
            UnusableFile: the content is not UTF-8.
        """
        if b"\0" in self.content or self.content.startswith(_UTF_16_MARKS):
            raise UnusableFile("is not UTF-8: it looks like UTF-16")
        try:
            return self.content.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise UnusableFile("is not UTF-8") from None


def read_configured(
    path: Path, max_bytes: int = MAX_BYTES, walk: Walk | None = None
) -> RegularFile:
    """Read a file that the configuration names, which may be on a dead mount.

    Raises:
        MissingFile: the file does not exist.
        SilentFile: it cannot be read for now.
        UnusableFile: it cannot be read.
    """
    try:
        return call_in_time(str(path), partial(read_regular, path, max_bytes), walk)
    except (TimeoutError, BlockingIOError) as error:
        raise SilentFile(f"cannot be read: {error.strerror}") from None


def read_regular(
    path: Path, max_bytes: int = MAX_BYTES, *, follows_links: bool = True
) -> RegularFile:
    """Read a file.

    Raises:
        MissingFile: the file does not exist.
        UnusableFile: the file cannot be read.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags if follows_links else flags | os.O_NOFOLLOW)
        try:
            return _read(descriptor, max_bytes)
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise MissingFile(f"cannot be read: {error.strerror}") from None
    except OSError as error:
        error_class = SilentFile if can_pass(error) else UnusableFile
        raise error_class(f"cannot be read: {error.strerror}") from None
    except UnusableFile:
        raise
    except ValueError:
        raise UnusableFile("cannot be read: a NUL in the path") from None


def _read(descriptor: int, max_bytes: int) -> RegularFile:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise UnusableFile(f"is {kind_of(status.st_mode)}, expected a regular file")
    chunks, remaining = [], max_bytes + 1
    while remaining and (chunk := os.read(descriptor, remaining)):
        chunks.append(chunk)
        remaining -= len(chunk)
    if not remaining:
        raise UnusableFile(f"is larger than {max_bytes} bytes")
    real_path = ""
    with suppress(OSError):  # a host that hides /proc
        real_path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
    return RegularFile(b"".join(chunks), stat.S_IMODE(status.st_mode), status.st_uid, real_path)
