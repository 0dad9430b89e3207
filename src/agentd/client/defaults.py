"""What both clients take where nothing is said: whom they call, and how long they wait."""

from __future__ import annotations

DEFAULT_SOCKET = "/run/agentd/agentd.sock"
TIMEOUT_S = 30.0
CREATE_TIMEOUT_S = 3600.0
"""A create may wait for the download of an image, a stop for what the node gives kernels."""
SILENCE_S = 60.0
"""A stream of events says at least every 15 s that it is there; a silent one is dead."""
CHUNK = 64 * 1024


def patience_s(timeout_s: float, stop_s: float | None) -> float:
    """Return how long a stop may take: the node's own time is not known here."""
    return CREATE_TIMEOUT_S if stop_s is None else timeout_s + stop_s
