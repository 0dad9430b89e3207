"""The audit log: one line for every mutating call, with caller, action and outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import structlog
from aiohttp import web

from agentd.errors import AgentdError
from agentd.events import Audit, EventKind, EventLog
from agentd.http.callers import caller_of, claim_of, kernel_of

log = structlog.get_logger()


class Auditor:
    """One audited call, used as a context manager around it."""

    def __init__(
        self,
        events: EventLog,
        on_error: Callable[[Audit, AgentdError], None] | None,
        request: web.Request,
        action: str,
        agent_id: str,
    ) -> None:
        """Prepare the entry; `on_error` is called with the error that answers the call."""
        self._events = events
        self._on_error = on_error
        self._request = request
        self._action = action
        self._agent_id = agent_id
        self._outcome = ""

    def __enter__(self) -> Self:
        return self

    def answered(self, outcome: str) -> None:
        """Set the outcome, such as the status of the response."""
        self._outcome = outcome

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._outcome = error.code if isinstance(error, AgentdError) else type(error).__name__
        caller, kernel_id = caller_of(self._request), kernel_of(self._request)
        claim_id = claim_of(self._request)
        audit = Audit(
            caller.name,
            caller.via,
            caller.uid,
            self._action,
            self._agent_id,
            kernel_id,
            self._outcome,
            claim_id,
        )
        is_its_own = caller.sees(self._agent_id)
        if self._on_error is not None and is_its_own and isinstance(error, AgentdError):
            self._on_error(audit, error)
        log.info(
            "rpc.call",
            caller=audit.caller,
            via=audit.via,
            uid=audit.uid,
            action=audit.action,
            path=self._request.path,
            agent_id=audit.agent_id,
            kernel_id=kernel_id,
            **({"claim_id": claim_id} if claim_id else {}),
            outcome=audit.outcome,
        )
        if kernel_id or claim_id:
            self._events.publish(EventKind.AUDIT, audit)
