"""The unix sockets that callers connect to."""

from __future__ import annotations

import asyncio
import grp
import os
import socket
from pathlib import Path

from agentd.errors import StartRefused

SOCKET_MODE = 0o660
BACKLOG = 1024


def unix_socket(path: Path, group: str | None) -> socket.socket:
    """Bind a unix socket with mode 0660; one that nobody listens on any more is replaced.

    Raises:
        StartRefused: it is in use, or cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_socket():
            _refuse_in_use(path)
            path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o777 & ~SOCKET_MODE)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        if group is not None:
            os.chown(path, -1, grp.getgrnam(group).gr_gid)
    except KeyError:
        raise StartRefused(f"socket {path}: no group {group!r} on this machine") from None
    except OSError as error:
        raise StartRefused(f"socket {path}: {error.strerror}") from None
    return listener


def _refuse_in_use(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
    raise StartRefused(f"socket {path} is in use by another process")


def with_a_queue(listener: asyncio.Server) -> asyncio.Server:
    """Make Linux queue more callers than are accepted at once, which is asyncio's backlog."""
    for listening in listener.sockets:
        with listening.dup() as same:
            same.listen(BACKLOG)
    return listener
