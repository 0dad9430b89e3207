"""Retention: the oldest ended kernels are pruned, with their logs."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import structlog

from agentd.core.kernel.states import ENDED, Kernel
from agentd.errors import AgentdError
from agentd.services.kernels.lifecycle import KernelService
from agentd.services.state import NodeState

log = structlog.get_logger()


class Retention:
    """Prunes ended kernels beyond a maximum."""

    def __init__(self, state: NodeState, service: KernelService, most: int) -> None:
        self._state = state
        self._service = service
        self._most = most
        self._ended = {kernel.kernel_id for kernel in state if kernel.state in ENDED}
        self._are_too_many = asyncio.Event()
        self._are_too_many.set()
        state.listen(self._changed)

    def _changed(self, before: Kernel | None, now: Kernel | None) -> None:
        if now is not None and now.state in ENDED:
            self._ended.add(now.kernel_id)
            if len(self._ended) > self._most:
                self._are_too_many.set()
        elif before is not None:
            self._ended.discard(before.kernel_id)

    async def run(self) -> None:
        """Prune whenever too many kernels have ended, until cancelled."""
        while True:
            await self._are_too_many.wait()
            self._are_too_many.clear()
            try:
                await self.once()
            except Exception:
                log.exception("retention.failed")

    async def once(self) -> None:
        """Prune the oldest ended kernels beyond the maximum.

        A kernel that cannot be removed stays until the next kernel ends.
        """
        ended = [k for k in self._state if k.state in ENDED]
        ended.sort(key=lambda kernel: kernel.ending.finished_at or kernel.created_at)
        for kernel in ended[: max(0, len(ended) - self._most)]:
            with suppress(AgentdError):
                await self._service.remove(kernel.kernel_id, only=kernel)
                log.info("kernel.pruned", kernel_id=kernel.kernel_id, keep_ended=self._most)
