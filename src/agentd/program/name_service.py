"""Entries of the name service (NSS): found, unknown, or unanswered. All lookups may block.

`pwd` and `grp` raise KeyError for every failure, also while a directory cannot be reached. The C
library tells the status of its last source only, so after "not found" each source is asked itself.
While this process can open no file, the C library skips those of the host itself.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from agentd.errors import RuntimeUnavailable
from agentd.os_errors import OsErrorKind, os_error_kind

_CONFIGURATION = Path("/etc/nsswitch.conf")
_OWN_NAMES = (Path("/etc/passwd"), Path("/etc/group"))
_DATABASES = {"getpwnam_r": "passwd", "getgrnam_r": "group", "getgrgid_r": "group"}
_BUFFER_BYTES, _MAX_BUFFER_BYTES = 1 << 16, 1 << 26
"""Bytes for the text of an entry: a group names all its members."""


class _Struct(ctypes.Structure):
    """The common begin of struct passwd and struct group of every C library."""

    _fields_ = (
        *(("name", ctypes.c_char_p), ("password", ctypes.c_char_p)),
        *(("number", ctypes.c_uint), ("group", ctypes.c_uint), ("rest", ctypes.c_char * 256)),
    )


class NameEntry(msgspec.Struct, frozen=True):
    """A user or a group; `group` is the primary one of a user."""

    name: str
    number: int
    group: int


def find_entry(function: str, key: str | int) -> NameEntry | None:
    """Return the entry of a name or number, None if there is none.

    `function` is `getpwnam_r`, `getgrnam_r` or `getgrgid_r`.

    Raises:
        RuntimeUnavailable: the name service failed, so there may be one.
    """
    try:
        wanted: Any = ctypes.c_uint(key) if isinstance(key, int) else os.fsencode(key)
    except ValueError:  # no host has such a name
        return None
    found, entry = ctypes.c_void_p(), _Struct()
    status, size = errno.ERANGE, _BUFFER_BYTES
    while status in (errno.ERANGE, errno.EINTR) and size <= _MAX_BUFFER_BYTES:
        text, find = ctypes.create_string_buffer(size), getattr(ctypes.CDLL(None), function)
        rest = (text, ctypes.c_size_t(size))
        status = find(wanted, ctypes.byref(entry), *rest, ctypes.byref(found))
        size *= 2
    if status:
        raise RuntimeUnavailable(f"the name service does not answer: {os.strerror(status)}")
    if found.value is not None:
        return NameEntry(os.fsdecode(entry.name), entry.number, entry.group)
    refuse_incomplete()
    for source in _sources(_DATABASES[function]):
        try:
            find = getattr(ctypes.CDLL(f"libnss_{source}.so.2"), f"_nss_{source}_{function}")
        except (OSError, AttributeError):  # the C library goes on without it, too
            continue
        # 0 is NSS_STATUS_NOTFOUND; below it are failures; above it, the entry has come meanwhile.
        if find(wanted, ctypes.byref(entry), *rest, ctypes.byref(ctypes.c_int())):
            raise RuntimeUnavailable(f"the name service does not answer: its source {source}")
    return None


def refuse_incomplete() -> None:
    """Refuse answers of the name service that may lack the names of this host.

    Raises:
        RuntimeUnavailable: this process cannot read them.
    """
    for path in _OWN_NAMES:
        _read_begin(path, 1)


def _sources(database: str) -> Iterator[str]:
    """Yield the sources of a database, none where nsswitch.conf(5) does not exist."""
    text = _read_begin(_CONFIGURATION)
    for line in re.findall(rf"^\s*{database}:(.*)", text, re.MULTILINE):
        yield from re.findall(r"\w+", re.sub(r"\[.*?\]|#.*", "", line))


def _read_begin(path: Path, size: int = -1) -> str:
    """Return the begin of a file, "" without one.

    Raises:
        RuntimeUnavailable: it cannot be read.
    """
    try:
        with path.open("rb", buffering=0) as file:
            return (file.read(size) or b"").decode(errors="replace")
    except OSError as error:
        if os_error_kind(error) is OsErrorKind.GONE:
            return ""
        reason = f"the name service does not answer: {path}: {error.strerror}"
        raise RuntimeUnavailable(reason) from None
