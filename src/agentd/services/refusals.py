"""Recent refusals: published as events and kept for an hour."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from agentd.errors import AgentdError
from agentd.events import Audit, EventKind, EventLog
from agentd.services.counts import NodeCounts

RETENTION_S = 3600.0
MAX_KEPT = 1024
MAX_DETAIL = 1000


class Refusal(msgspec.Struct, frozen=True):
    """A refused create of a kernel or claim; `at` in seconds since the epoch."""

    at: float
    caller: str
    agent_id: str
    kernel_id: str
    code: str
    detail: str
    claim_id: str = ""


class Refusals:
    """The refusals of the last hour, at most `MAX_KEPT`."""

    def __init__(self, counts: NodeCounts, events: EventLog, now: Callable[[], float]) -> None:
        self._counts = counts
        self._events = events
        self._now = now
        self._recent: deque[Refusal] = deque(maxlen=MAX_KEPT)

    def record(self, call: Audit, error: AgentdError) -> None:
        """Record an error that answered a create; its text may be shown to other callers.

        Those of claims are counted with the claims (`ClaimCounts`).
        """
        if call.action != "create_claim":
            self._counts.count_refusal(call.agent_id, call.kernel_id, error)
        detail = error.public_text()[:MAX_DETAIL]
        refusal = Refusal(
            at=self._now(),
            caller=call.caller,
            agent_id=call.agent_id,
            kernel_id=call.kernel_id,
            code=error.code,
            detail=detail,
            claim_id=call.claim_id,
        )
        self._recent.append(refusal)
        self._events.publish(EventKind.REFUSAL, refusal)

    def recent(self) -> Sequence[Refusal]:
        """Return the refusals of the last hour, oldest first."""
        since = self._now() - RETENTION_S
        while self._recent and self._recent[0].at < since:
            self._recent.popleft()
        return tuple(self._recent)
