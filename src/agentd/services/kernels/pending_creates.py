"""Creates in progress: their tasks, their failures, and their end when the daemon stops.

A failed create releases its share only if nothing of it is left, which the runtime must prove
(`agentd.services.protocols.Runtime.create`). Until then it is unresolved: its share stays held, its
intent stays on disk, and the reconciler resolves it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NamedTuple

import structlog

from agentd.concurrency import Deadline
from agentd.core.kernel.states import STARTING, Kernel, KernelState
from agentd.errors import AgentdError, Draining, KernelConflict, OutcomeUnknown, public_reason
from agentd.services.protocols import Clock, CreateUndone
from agentd.services.state import NodeState

log = structlog.get_logger()

UNRESOLVED_GRACE_S = 10.0
"""Seconds after which absence from a list proves that an unresolved create left nothing."""
BEFORE_CREATE = frozenset({KernelState.PREPARING, KernelState.PULLING})
"""States of a create in which the runtime has nothing to undo."""


class Drained(NamedTuple):
    """Creates ended by a stop: `cancelled` ones left nothing, `unresolved` ones may have."""

    cancelled: list[str]
    unresolved: list[str]


class PendingCreates:
    """The creates in progress, by kernel id."""

    def __init__(self, state: NodeState, clock: Clock) -> None:
        self._is_draining = False
        self._state = state
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[Kernel]] = {}
        self._waiting_abandoned = asyncio.get_running_loop().create_future()
        """Done once a stop waits for creates no longer."""

    def __contains__(self, kernel_id: str) -> bool:
        return kernel_id in self._tasks

    def require_open(self) -> None:
        """Refuse a create while the daemon stops.

        Raises:
            Draining: the daemon is stopping.
        """
        if self._is_draining:
            raise Draining("the daemon is stopping")

    def start(self, kernel_id: str, create: Coroutine[Any, Any, Kernel]) -> None:
        """Run a create, independently of its caller."""
        task = asyncio.create_task(self._run(kernel_id, create))
        self._tasks[kernel_id] = task
        task.add_done_callback(lambda done: self._on_done(kernel_id, create, done))

    async def _run(self, kernel_id: str, create: Coroutine[Any, Any, Kernel]) -> Kernel:
        """Run a create, and note its end in the same step: another of its id may begin next."""
        try:
            return await create
        finally:
            self._finish(kernel_id)

    def _on_done(
        self, kernel_id: str, create: Coroutine[Any, Any, Kernel], task: asyncio.Task[Kernel]
    ) -> None:
        if self._tasks.get(kernel_id) is task:  # cancelled before its first step
            create.close()
            self._finish(kernel_id)
        # A caller may have left: asking for the error marks it as retrieved.
        if not task.cancelled() and task.exception() is None:
            log.info("kernel.created", kernel_id=kernel_id, agent_id=task.result().agent_id)

    async def wait(self, kernel_id: str) -> Kernel:
        """Wait for a create; a caller that leaves does not stop it.

        Raises:
            OutcomeUnknown: the daemon stops without waiting for it.
            Draining: the stop cancelled it.
            KernelConflict: a delete cancelled it.
        """
        task = self._tasks[kernel_id]
        await asyncio.wait({task, self._waiting_abandoned}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            reason = f"the daemon stopped during the create; {kernel_id} may exist"
            raise OutcomeUnknown(reason, kernel_id)
        if not task.cancelled():
            return task.result()
        if self._is_draining:
            raise Draining("the daemon stopped before the kernel ran")
        raise KernelConflict("the kernel was deleted while it was being created")

    async def cancel(self, kernel_id: str) -> None:
        """Cancel a create and wait for its end.

        A second cancellation would interrupt the cleanup after the first, so it is sent once.
        """
        task = self._tasks[kernel_id]
        if not task.cancelling():
            task.cancel()
        await asyncio.wait([task])

    def mark_failed(self, kernel_id: str, error: BaseException, *, keep_failure: bool) -> None:
        """Release the share of a failed create that left nothing.

        With `keep_failure` the kernel is listed as `failed`.
        """
        if keep_failure and not isinstance(error, asyncio.CancelledError):
            kernel = self._state.kernel(kernel_id)
            self._state.put_kernel(kernel.moved_to(KernelState.FAILED, reason=str(error)))
        else:
            self._state.drop_kernel(kernel_id)
        reason = public_reason(error)
        if isinstance(error, asyncio.CancelledError):
            reason = "agentd is stopping" if self._is_draining else "the kernel was deleted"
        log.warning("kernel.create_failed", kernel_id=kernel_id, reason=reason)

    def mark_unresolved(
        self, kernel_id: str, error: BaseException, *, keep_failure: bool
    ) -> OutcomeUnknown:
        """Mark a create as unresolved and return the error for its caller."""
        self._start_grace(kernel_id, keep_failure=keep_failure)
        reason = public_reason(error)
        if isinstance(error, OutcomeUnknown):
            log.warning("kernel.unresolved", kernel_id=kernel_id, reason=reason)
            return OutcomeUnknown(str(error), kernel_id)
        log.warning("kernel.unresolved", kernel_id=kernel_id, reason=reason, exc_info=error)
        detail = f"kernel {kernel_id} may exist: {type(error).__name__}: {error}"
        return OutcomeUnknown(detail, kernel_id)

    def _finish(self, kernel_id: str) -> None:
        del self._tasks[kernel_id]
        if kernel_id in self._state.unresolved:
            return
        state = kernel.state if (kernel := self._state.kernels.get(kernel_id)) else None
        if state is KernelState.PREPARING:
            self._state.drop_kernel(kernel_id)  # cancelled before the runtime was called
        elif state in STARTING:
            self._start_grace(kernel_id)

    def _start_grace(self, kernel_id: str, *, keep_failure: bool = False) -> None:
        kernel = self._state.kernel(kernel_id)
        if kernel.state in BEFORE_CREATE:
            self._state.put_kernel(kernel.moved_to(KernelState.CREATING))
        until = self._clock.steady() + UNRESOLVED_GRACE_S
        self._state.mark_unresolved(kernel_id, until, keep_failure=keep_failure)

    async def drain(self, deadline: Deadline) -> Drained:
        """Refuse further creates and end those in progress.

        Creates that have not reached the runtime are cancelled. The others may finish; one that is
        late is left with its intent, as after a crash.
        """
        self._is_draining = True
        tasks = dict(self._tasks)
        cancellable = [k for k in tasks if self._state.kernel(k).state in BEFORE_CREATE]
        for kernel_id in cancellable:
            if not tasks[kernel_id].cancelling():
                tasks[kernel_id].cancel()
        if tasks:
            await asyncio.wait(tasks.values(), timeout=deadline.remaining_s())
        self._waiting_abandoned.set_result(None)
        unresolved = [k for k in tasks if k in self._tasks or k in self._state.unresolved]
        return Drained([k for k in cancellable if k not in unresolved], unresolved)


def may_have_left_remains(error: BaseException, kernel: Kernel) -> bool:
    """Return whether a failed create may have left something: see `Runtime.create`."""
    if isinstance(error, OutcomeUnknown):
        return True
    return kernel.state not in BEFORE_CREATE and not isinstance(error, (AgentdError, CreateUndone))
