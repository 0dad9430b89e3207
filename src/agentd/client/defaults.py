"""Defaults of both clients: addresses and timeouts."""

from __future__ import annotations

DEFAULT_SOCKET = "/run/agentd/agentd.sock"
TIMEOUT_S = 30.0
CREATE_TIMEOUT_S = 3600.0
"""A create may wait for a pull, a stop for the node's own timeout."""
SILENCE_S = 60.0
"""An event stream sends a keepalive every 15 s; a silent one is dead."""
CHUNK = 64 * 1024


def stop_timeout_s(timeout_s: float, stop_s: float | None) -> float:
    """Return how long a stop may take; the node's own timeout is not known here."""
    return CREATE_TIMEOUT_S if stop_s is None else timeout_s + stop_s
