"""The meaning of an OSError: the only place where error numbers of the host are told apart.

Only "not found" proves that something is gone. Anything else that cannot be read may still be
there, and holds what it may hold.
"""

from __future__ import annotations

import enum
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from agentd.errors import AgentdError, RuntimeFailure, RuntimeUnavailable, StateUnavailable


class OsErrorKind(enum.Enum):
    """The meaning of an OSError for a file, a folder, a process or a cgroup."""

    GONE = "gone"
    """It does not exist (ESRCH: a process; ENODEV: a cgroup that is being removed)."""
    PASSING = "passing"
    """Nothing: the host lacks a descriptor, memory or a process id; a retry may succeed."""
    DISK = "disk"
    """Its disk is full, out of inodes, read-only or broken."""
    SILENT = "silent"
    """Its mount is dead, or lacks its server or its key: unreadable until that is back."""
    UNREADABLE = "unreadable"
    """It is there, or may be, and cannot be used."""


_KINDS = {
    OsErrorKind.GONE: (errno.ENOENT, errno.ESRCH, errno.ENODEV),
    OsErrorKind.PASSING: (
        errno.EAGAIN,
        errno.EINTR,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
    ),
    OsErrorKind.DISK: (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EIO,
        errno.EUCLEAN,
        errno.EBADMSG,
    ),
    OsErrorKind.SILENT: (
        *(errno.ETIMEDOUT, errno.ESTALE, errno.ENOTCONN, errno.ECONNABORTED),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
        *(errno.ENOKEY, errno.EKEYEXPIRED),
    ),
}
_KIND_BY_NUMBER = {number: kind for kind, numbers in _KINDS.items() for number in numbers}

ABSENT_PATH = frozenset({errno.ENOENT, errno.ENOTDIR})
UNUSABLE_PATH = ABSENT_PATH | {errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG}
"""Errors of a path that a request names which stay until its files are changed; others are its
file system's."""


@contextmanager
def ending_process_as_gone() -> Iterator[None]:
    """Raise ProcessLookupError for EINVAL, which Linux reports of a process that is ending.

    It has lost its mounts (proc_pid_mountinfo(5)), or its number names but a session
    (pidfd_open(2) of older versions).
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from error


def can_pass(error: OSError) -> bool:
    """Return whether what cannot be read may be readable later, without an edit of the operator."""
    return os_error_kind(error) not in (OsErrorKind.GONE, OsErrorKind.UNREADABLE)


def os_error_kind(error: OSError) -> OsErrorKind:
    """Return what an OSError says; one without a known number is `UNREADABLE`."""
    return _KIND_BY_NUMBER.get(error.errno or 0, OsErrorKind.UNREADABLE)


def os_error_as_refusal(error: OSError, subject: str) -> AgentdError:
    """Return the error of a request that failed for an OSError; nothing may remain of it."""
    kind = os_error_kind(error)
    reason = f"{error.filename or subject}: {error.strerror or error}"
    if kind in (OsErrorKind.PASSING, OsErrorKind.SILENT) or isinstance(error, TimeoutError):
        return RuntimeUnavailable(reason)
    return StateUnavailable(reason) if kind is OsErrorKind.DISK else RuntimeFailure(reason)
