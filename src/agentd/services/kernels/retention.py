"""Retention: the oldest ended kernels are pruned, with their logs."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import structlog

from agentd.concurrency import wait_event
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


class Retention:
    """Prunes ended kernels beyond a maximum number, and beyond `MAX_ENDED_BYTES`.

    The oldest are those whose ends were observed first: a clock that is set changes no order. Only
    ends from before this start are ordered by their times. A time after `now` is wrong, and old.
    """

    def __init__(
        self, state: NodeState, service: KernelService, maximum: int, *, now: float
    ) -> None:
        self._state = state
        self._service = service
        self._maximum = maximum
        self._sizes: dict[str, int] = {}
        """The bytes of each ended kernel's record, in the order in which the ends were observed."""
        self._prune_event = asyncio.Event()
        self._prune_event.set()

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
                self._prune_event.set()
        elif (kernel := now or before) is not None:
            self._sizes.pop(kernel.kernel_id, None)

    async def run(self) -> None:
        """Prune whenever too many kernels have ended, and what could not be, until cancelled."""
        while True:
            await wait_event(self._prune_event, RETRY_PAUSE_S)
            self._prune_event.clear()
            try:
                await self.prune()
            except Exception:
                log.exception("retention.failed")

    async def prune(self) -> None:
        """Prune the oldest ended kernels beyond the maxima; the latest one to end has any size.

        A kernel that cannot be removed stays until the next prune.
        """
        latest = next(reversed(self._sizes), None)
        ended = [(self._state.kernel(kernel_id), size) for kernel_id, size in self._sizes.items()]
        count, total_size = len(ended), sum(self._sizes.values())
        for kernel, size in ended:
            is_too_large = total_size > MAX_ENDED_BYTES and kernel.kernel_id != latest
            if count <= self._maximum and not is_too_large:
                continue
            count, total_size = count - 1, total_size - size
            with suppress(AgentdError):
                await self._service.remove(kernel.kernel_id, expected=kernel)
                log.info("kernel.pruned", kernel_id=kernel.kernel_id, keep_ended=self._maximum)
