"""Rate-limited warnings about clients."""

from __future__ import annotations

import time

import structlog

log = structlog.get_logger()

LOG_PAUSE_S = 1.0
"""Minimum seconds between two warnings."""


class ClientWarnings:
    """Warnings about clients, one in `LOG_PAUSE_S`; `further` counts the suppressed ones."""

    def __init__(self) -> None:
        self._quiet_until = 0.0
        self._suppressed = 0

    def __call__(self, event: str, **facts: object) -> None:
        now = time.monotonic()
        if now < self._quiet_until:
            self._suppressed += 1
            return
        log.warning(event, further=self._suppressed, **facts)
        self._quiet_until, self._suppressed = now + LOG_PAUSE_S, 0


warn_of_client = ClientWarnings()
