"""Warnings about weak credentials, and about certificates outside their validity."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
import structlog

log = structlog.get_logger()

LOG_INTERVAL_S = 24 * 3600.0
"""Seconds after which the warnings are logged again."""


class Weakness(msgspec.Struct, frozen=True):
    """A warning that holds from `since` to `until` (epoch seconds)."""

    text: str
    since: float = 0.0
    until: float | None = None

    def holds_at(self, now: float) -> bool:
        """Return whether the warning holds at a time."""
        return self.since <= now and (self.until is None or now < self.until)


class Weaknesses:
    """The warnings about the credentials in use."""

    def __init__(self) -> None:
        self._weaknesses: tuple[Weakness, ...] = ()

    def replace(self, weaknesses: Sequence[Weakness]) -> None:
        """Replace the warnings after the credentials changed."""
        self._weaknesses = tuple(weaknesses)
        self._log()

    def warnings(self) -> list[str]:
        """Return the warnings that hold now."""
        now = time.time()
        return [weakness.text for weakness in self._weaknesses if weakness.holds_at(now)]

    async def log_daily(self) -> None:
        """Log the warnings once a day, forever."""
        while True:
            await asyncio.sleep(LOG_INTERVAL_S)
            self._log()

    def _log(self) -> None:
        for text in self.warnings():
            log.warning("credential.weak", reason=text)
