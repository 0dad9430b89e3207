"""The audit log: one line for every mutating call, with caller, action and outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
from aiohttp import web

from agentd.errors import AgentdError
from agentd.events import Audit, EventKind, EventLog
from agentd.http.callers import caller_of, id_of

log = structlog.get_logger()


class AuditedCall:
    """A call that is being audited."""

    outcome = ""

    def set_outcome(self, outcome: str) -> None:
        """Set the outcome of a call without an error, such as the status of the response."""
        self.outcome = outcome


@contextmanager
def audit_call(
    events: EventLog,
    on_error: Callable[[Audit, AgentdError], None] | None,
    request: web.Request,
    action: str,
    agent_id: str,
) -> Iterator[AuditedCall]:
    """Audit a call; `on_error` is called with the error that answers it."""
    call, failure = AuditedCall(), None
    try:
        yield call
    except BaseException as error:
        failure = error
        call.outcome = error.code if isinstance(error, AgentdError) else type(error).__name__
        raise
    finally:
        caller, kernel_id = caller_of(request), id_of(request, "kernel")
        claim_id = id_of(request, "claim")
        audit = Audit(
            caller=caller.name,
            via=caller.via,
            uid=caller.uid,
            action=action,
            agent_id=agent_id,
            kernel_id=kernel_id,
            outcome=call.outcome,
            claim_id=claim_id,
        )
        if on_error is not None and caller.sees(agent_id) and isinstance(failure, AgentdError):
            on_error(audit, failure)
        log.info(
            "rpc.call",
            caller=audit.caller,
            via=audit.via,
            uid=audit.uid,
            action=audit.action,
            path=request.path,
            agent_id=audit.agent_id,
            kernel_id=kernel_id,
            **({"claim_id": claim_id} if claim_id else {}),
            outcome=audit.outcome,
        )
        if kernel_id or claim_id:
            events.publish(EventKind.AUDIT, audit)
