"""Limits on connections, and TCP keepalive."""

from __future__ import annotations

import resource
import socket

from agentd.http.connections.client_warnings import warn_of_client

TCP_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""Seconds of silence before the first probe, seconds between probes, and probes until the end."""


class ConnectionLimit:
    """A limit on connections of one kind, at most a fraction of all file descriptors."""

    def __init__(self, maximum: int, fraction: float) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._maximum = min(maximum, max(1, int(descriptors * fraction)))
        self._open = 0

    def try_acquire(self) -> bool:
        """Count a connection unless the limit is reached; return whether it may stay."""
        if self._open >= self._maximum:
            warn_of_client("connection.refused", most=self._maximum)
            return False
        self._open += 1
        return True

    def release(self) -> None:
        """Uncount a connection."""
        self._open -= 1


def enable_keepalive(connection: socket.socket | None) -> None:
    """Enable TCP keepalive to detect dead clients."""
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        for option, value in TCP_KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
