"""Counts of claims: requests by agent and result, and ends by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from agentd.core.claim.claim import EndReason
from agentd.errors import RequestError
from agentd.services.counts import CREATED, FAILED, REFUSED


class ClaimCounts:
    """Counts since the daemon started."""

    def __init__(self) -> None:
        self._results: Counter[tuple[str, str]] = Counter()
        self._ends: Counter[tuple[str, EndReason]] = Counter()

    @property
    def results(self) -> Mapping[tuple[str, str], int]:
        """The number of requests by agent and result."""
        return MappingProxyType(self._results)

    @property
    def ends(self) -> Mapping[tuple[str, EndReason], int]:
        """The number of ended claims by agent and reason."""
        return MappingProxyType(self._ends)

    @contextmanager
    def count_request(self, agent_id: str) -> Iterator[None]:
        """Count a request by how it ends: an error of the caller's is a refusal."""
        try:
            yield
        except BaseException as error:
            result = REFUSED if isinstance(error, RequestError) else FAILED
            self._results[agent_id, result] += 1
            raise
        self._results[agent_id, CREATED] += 1

    def count_end(self, agent_id: str, reason: EndReason) -> None:
        """Count the end of a claim."""
        self._ends[agent_id, reason] += 1
