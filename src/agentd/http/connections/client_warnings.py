"""Rate-limited warnings about clients."""

from __future__ import annotations

import time

import structlog

log = structlog.get_logger()

LOG_PAUSE_S = 1.0
"""At most one line of log in this time says what was wrong with requests."""


class ClientWarnings:
    """Warnings about clients, one in `LOG_PAUSE_S` at most; `further` counts those left out."""

    def __init__(self) -> None:
        self._quiet_until = 0.0
        self._unsaid = 0

    def __call__(self, event: str, **facts: object) -> None:
        now = time.monotonic()
        if now < self._quiet_until:
            self._unsaid += 1
            return
        log.warning(event, further=self._unsaid, **facts)
        self._quiet_until, self._unsaid = now + LOG_PAUSE_S, 0


warn_of_client = ClientWarnings()
