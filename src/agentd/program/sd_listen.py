"""Sockets that systemd holds and passes to the service (sd_listen_fds(3))."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

_FIRST = 3
"""SD_LISTEN_FDS_START."""


def inherited_sockets(environ: MutableMapping[str, str] = os.environ) -> dict[str, socket.socket]:
    """Return the listening sockets that systemd passed, by address.

    An address is a path, or `host:port`. The variables are removed, so that no child uses them.
    """
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal():
        return {}
    sockets = {}
    for descriptor in range(_FIRST, _FIRST + int(count)):
        listener = socket.socket(fileno=descriptor)
        listener.set_inheritable(False)
        listener.setblocking(False)
        sockets[address_of(listener)] = listener
    return sockets


def address_of(listener: socket.socket) -> str:
    """Return the address of a listening socket: a path, or `host:port` with IPv6 in brackets."""
    name = listener.getsockname()
    if isinstance(name, tuple):
        host = f"[{name[0]}]" if ":" in name[0] else name[0]
        return f"{host}:{name[1]}"
    return os.fsdecode(name)
