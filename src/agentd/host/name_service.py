"""The name service (NSS): whether it has answered that a user or a group does not exist.

`pwd` and `grp` raise KeyError for every failure, also while a directory cannot be reached. While
this process can open no file, the C library skips the host's own names, and the "not found" of the
next service of nsswitch.conf(5) says nothing of them.
"""

from __future__ import annotations

import ctypes
import os

from agentd.errors import RuntimeUnavailable
from agentd.os_errors import OsErrorKind, os_error_kind

_OWN_NAMES = ("/etc/passwd", "/etc/group")
_MAX_ENTRY_BYTES, _BUFFER_BYTES = 256, 1 << 16
"""More than a C library's struct passwd or struct group, and than the text of a small entry."""


def refuse_unanswered(function: str, name: str) -> None:
    """Refuse to take a name that was not found for unknown, unless the name service says so.

    `function` is `getpwnam_r` or `getgrnam_r`; may block, as these do.

    Raises:
        RuntimeUnavailable: the name service failed, so the name may exist.
    """
    try:
        encoded = os.fsencode(name)
    except ValueError:  # no host has such a name
        return
    refuse_incomplete()
    entry = ctypes.create_string_buffer(_MAX_ENTRY_BYTES)
    text, size = ctypes.create_string_buffer(_BUFFER_BYTES), ctypes.c_size_t(_BUFFER_BYTES)
    find, result = getattr(ctypes.CDLL(None), function), ctypes.c_void_p()
    if status := find(encoded, entry, text, size, ctypes.byref(result)):
        _refuse(OSError(status, os.strerror(status)))
    if result.value is not None:
        raise RuntimeUnavailable("the name service has failed, and answers again")


def refuse_incomplete() -> None:
    """Refuse answers of the name service that may lack the names of this host.

    Raises:
        RuntimeUnavailable: this process cannot read them.
    """
    for path in _OWN_NAMES:
        try:
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - Path.open buffers
                file.read(1)
        except OSError as error:
            _refuse(error)


def _refuse(error: OSError) -> None:
    if os_error_kind(error) is not OsErrorKind.GONE:
        reason = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
        raise RuntimeUnavailable(f"the name service does not answer: {reason}") from None
