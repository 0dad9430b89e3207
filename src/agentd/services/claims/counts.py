"""Counts of claims: requests by agent and result, and ends by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from agentd.core.claim.claim import EndReason
from agentd.errors import RequestError
from agentd.services.counts import CREATED, FAILED, REFUSED


class ClaimCounts:
    """Counts since the daemon started."""

    def __init__(self) -> None:
        self.results: Counter[tuple[str, str]] = Counter()
        """Requests by agent and result."""
        self.ends: Counter[tuple[str, EndReason]] = Counter()
        """Ended claims by agent and reason."""

    @contextmanager
    def count_request(self, agent_id: str) -> Iterator[None]:
        """Count a request by how it ends: an error of the caller's is a refusal."""
        try:
            yield
        except BaseException as error:
            result = REFUSED if isinstance(error, RequestError) else FAILED
            self.results[agent_id, result] += 1
            raise
        self.results[agent_id, CREATED] += 1

    def count_end(self, agent_id: str, reason: EndReason) -> None:
        """Count the end of a claim."""
        self.ends[agent_id, reason] += 1
