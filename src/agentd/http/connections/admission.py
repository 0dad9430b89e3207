"""Admission: how many connections there may be, and those whose first request has not come."""

from __future__ import annotations

import asyncio
import resource
import socket

from agentd.concurrency import is_set_within
from agentd.http.connections.client_warnings import warn_of_client

TCP_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""Seconds of silence until it asks, seconds between questions, and how many stay unanswered."""


class Limits:
    """How many connections of one kind there are, and may be: a part of all descriptors at most."""

    def __init__(self, most: int, part: float) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = min(most, int(descriptors * part))
        self._open = 0

    def admit(self) -> bool:
        """Count one more, if there may be one more."""
        if self._open >= self._most:
            warn_of_client("rpc.too_many_connections", most=self._most)
            return False
        self._open += 1
        return True

    def release(self) -> None:
        """Count one less."""
        self._open -= 1


class Newcomers:
    """Connections whose first request has not come: a caller that was let in is about to ask."""

    def __init__(self) -> None:
        self._waiting: set[object] = set()
        self._are_gone = asyncio.Event()

    def add(self, connection: object) -> None:
        """Take in one that was accepted."""
        self._waiting.add(connection)

    def discard(self, connection: object) -> None:
        """Leave out one that has asked, or hung up."""
        self._waiting.discard(connection)
        if not self._waiting:
            self._are_gone.set()

    async def heard(self, patience_s: float) -> None:
        """Wait until all have asked or hung up, or have had their time."""
        if self._waiting:
            self._are_gone.clear()
            await is_set_within(self._are_gone, patience_s)


def enable_keepalive(connection: socket.socket | None) -> None:
    """Have the system find out about a TCP caller that is gone without a word (tcp(7))."""
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        for option, value in TCP_KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
