"""The publisher's state for its operator: the log, and the status in systemd."""

from __future__ import annotations

import time

import structlog

from agentd.errors import AgentdError
from agentd.program.sd_notify import Notifier

log = structlog.get_logger()

LOG_PERIOD_S = 30.0
"""Seconds after which an error that lasts is logged again; later ones take twice as long."""


class PublisherStatus:
    """Logs an outage a few times, however long it takes, and keeps the status current."""

    def __init__(self) -> None:
        self._notifier = Notifier()
        self._text = "not in the fleet yet"
        self._log_times: dict[str, tuple[float, float]] = {}
        """When each subject was first logged, and when it is next."""

    def ready(self) -> None:
        """Report the end of the start, whether or not the node is in the fleet."""
        self._notifier.ready(self._text)

    def show(self, text: str) -> None:
        """Show a status."""
        if text != self._text:
            self._text = text
            self._notifier.status(text)

    def published(self, node_id: str, fleet: str, rival: str) -> None:
        """Show that all is written; `rival` is another publisher that waits for the node id."""
        waiting = f"; another publisher, at {rival}, waits for the node id" if rival else ""
        self.show(f"node {node_id} is in fleet {fleet}{waiting}")

    def failed(self, where: str, error: AgentdError) -> None:
        """Show and log an error of publishing."""
        self.show(f"{where}: {error}")
        if self._is_due(error.code):
            log.error("node.publish_failed", code=error.code, reason=str(error))

    def has_rival(self, node_id: str, url: str, rival: str) -> None:
        """Log that another publisher waits for the node id."""
        if self._is_due(rival):
            log.error("node.duplicate_id", node_id=node_id, first=url, second=rival)

    def _is_due(self, subject: str) -> bool:
        """Return whether to log a subject now, which is asked as long as it lasts."""
        now = time.monotonic()
        first_at, next_at = self._log_times.get(subject, (now, now))
        if now > next_at + LOG_PERIOD_S:  # it had passed
            first_at = next_at = now
        if is_due := now >= next_at:
            next_at = now + max(LOG_PERIOD_S, now - first_at)
        self._log_times[subject] = first_at, next_at
        return is_due
