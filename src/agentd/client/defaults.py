"""Defaults of both clients: addresses, timeouts, and the options of connections."""

from __future__ import annotations

import socket

DEFAULT_SOCKET = "/run/agentd/agentd.sock"
TIMEOUT_S = 30.0
CREATE_TIMEOUT_S = 3600.0
"""A create may wait for a pull, a stop for the node's own timeout."""
SILENCE_S = 60.0
"""An event stream sends a keepalive every 15 s; a silent one is dead."""
CHUNK = 64 * 1024
TCP_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000),
)
"""Options of every TCP connection (tcp(7)): one over a dead path ends after about ten seconds."""


def stop_timeout_s(timeout_s: float, stop_s: float | None) -> float:
    """Return how long a stop may take; the node's own timeout is not known here."""
    return CREATE_TIMEOUT_S if stop_s is None else timeout_s + stop_s


def enable_keepalive(connection: socket.socket) -> None:
    """Detect a dead path of a TCP connection, also while nothing is sent."""
    for level, option, value in TCP_OPTIONS:
        connection.setsockopt(level, option, value)
