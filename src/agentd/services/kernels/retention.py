"""Retention: which ended kernels are removed, with their logs, and when."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import structlog

from agentd.concurrency import wait_event
from agentd.core.access import Caller
from agentd.core.kernel.record import encode
from agentd.core.kernel.states import ENDED, Kernel
from agentd.errors import AgentdError
from agentd.services.kernels.kernel_service import KernelService
from agentd.services.state import NodeState

log = structlog.get_logger()

MAX_ENDED_BYTES = 64 << 20
"""Maximum bytes of the records of all ended kernels."""
RETRY_PAUSE_S = 60.0
"""Seconds until the next prune if no kernel ends: an earlier one may have failed."""


REMOVE_DELAY_S = 10.0
"""Seconds that a kernel which `removes` itself stays after its end was read, for lost answers."""


class EndReads:
    """The ended kernels that remove themselves, since their creators have read their ends."""

    def __init__(self, steady: Callable[[], float]) -> None:
        self._wake = asyncio.Event()
        self._steady = steady
        self._due_at: dict[str, float] = {}

    def note(self, kernel: Kernel, caller: Caller) -> None:
        """Note that a caller was answered with a kernel; only its creator counts."""
        is_creator = (caller.name, caller.uid) == (kernel.created_by, kernel.creator_uid)
        is_noted = kernel.kernel_id in self._due_at
        if kernel.removes and is_creator and kernel.state in ENDED and not is_noted:
            self._due_at[kernel.kernel_id] = self._steady() + REMOVE_DELAY_S
            asyncio.get_running_loop().call_later(REMOVE_DELAY_S, self.wake)

    def forget(self, kernel_id: str) -> None:
        """Forget a kernel that was removed, or runs again."""
        self._due_at.pop(kernel_id, None)

    def is_due(self, kernel_id: str) -> bool:
        return kernel_id in self._due_at and self._due_at[kernel_id] <= self._steady()

    def wake(self) -> None:
        """End the wait for the next kernel."""
        self._wake.set()

    async def wait(self, maximum_s: float) -> None:
        """Wait until another kernel may be due, or for `wake`, or the maximum."""
        await wait_event(self._wake, maximum_s)
        self._wake.clear()


class Retention:
    """Removes ended kernels: those of `EndReads`, and the oldest ones beyond two maxima.

    The maxima are a number, and `MAX_ENDED_BYTES`.

    The oldest are those whose ends were observed first: a clock that is set changes no order. Only
    ends from before this start are ordered by their times. A time after `now` is wrong, and old.
    """

    def __init__(
        self,
        state: NodeState,
        service: KernelService,
        maximum: int,
        reads: EndReads,
        *,
        now: float,
    ) -> None:
        self._state = state
        self._service = service
        self._maximum = maximum
        self._sizes: dict[str, int] = {}
        """The bytes of each ended kernel's record, in the order in which the ends were observed."""
        self._reads = reads
        reads.wake()

        def end_order(kernel: Kernel) -> tuple[bool, float]:
            finished_at = kernel.ending.finished_at or kernel.created_at
            return finished_at <= now, finished_at

        for kernel in sorted(state, key=end_order):
            self._on_kernel_change(None, kernel)
        state.subscribe(self._on_kernel_change)

    def _on_kernel_change(self, before: Kernel | None, now: Kernel | None) -> None:
        if now is not None and now.state in ENDED:
            self._sizes[now.kernel_id] = len(encode(now, ""))
            if len(self._sizes) > self._maximum or sum(self._sizes.values()) > MAX_ENDED_BYTES:
                self._reads.wake()
        elif (kernel := now or before) is not None:
            self._sizes.pop(kernel.kernel_id, None)
            self._reads.forget(kernel.kernel_id)

    async def run(self) -> None:
        """Prune whenever something is to be pruned or could not be before, until cancelled."""
        while True:
            await self._reads.wait(RETRY_PAUSE_S)
            try:
                await self.prune()
            except Exception:
                log.exception("retention.failed")

    async def prune(self) -> None:
        """Remove the kernels that are due, and the oldest beyond the maxima.

        Only an agent with more than an equal part of a maximum loses kernels to it. The latest one
        to end has any size.

        A kernel that cannot be removed stays until the next prune.
        """
        latest = next(reversed(self._sizes), None)
        ended = [(self._state.kernel(kernel_id), size) for kernel_id, size in self._sizes.items()]
        counts, sizes = Counter[str](), Counter[str]()
        for kernel, size in ended:
            counts[kernel.agent_id] += 1
            sizes[kernel.agent_id] += size
        for kernel, size in ended:
            agent_id = kernel.agent_id
            is_too_many = _is_above_part(counts, agent_id, self._maximum)
            is_too_large = _is_above_part(sizes, agent_id, MAX_ENDED_BYTES)
            is_too_large = is_too_large and kernel.kernel_id != latest
            is_due = self._reads.is_due(kernel.kernel_id)
            if not (is_too_many or is_too_large or is_due):
                continue
            counts[agent_id] -= 1
            sizes[agent_id] -= size
            with suppress(AgentdError):
                await self._service.remove(kernel.kernel_id, expected=kernel)
                if not is_due:
                    log.info("kernel.pruned", kernel_id=kernel.kernel_id, keep_ended=self._maximum)


def _is_above_part(counts: Counter[str], agent_id: str, maximum: int) -> bool:
    """Return whether all agents are above a maximum, and one above its equal part of it."""
    return counts.total() > maximum and counts[agent_id] * len(counts) > maximum
