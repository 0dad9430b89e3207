"""The name service (NSS): whether it has answered that a user or a group does not exist.

`pwd` and `grp` raise KeyError for every failure, also while a directory cannot be reached.
"""

from __future__ import annotations

import ctypes
import os

from agentd.errors import RuntimeUnavailable
from agentd.os_errors import OsErrorKind, os_error_kind

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
    entry = ctypes.create_string_buffer(_MAX_ENTRY_BYTES)
    text, size = ctypes.create_string_buffer(_BUFFER_BYTES), ctypes.c_size_t(_BUFFER_BYTES)
    find = getattr(ctypes.CDLL(None), function)
    if status := find(encoded, entry, text, size, ctypes.byref(ctypes.c_void_p())):
        error = OSError(status, os.strerror(status))
        if os_error_kind(error) is not OsErrorKind.GONE:
            raise RuntimeUnavailable(f"the name service does not answer: {error.strerror}")
