"""What goes on while nobody asks: following runtimes, settling, watching devices.

One task group. A loop that fails is logged and goes on; only cancellation ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from agentd.errors import RuntimeUnavailable
from agentd.services.adoption import Adoption
from agentd.services.events import EventKind
from agentd.services.interfaces import Plugins, Runtime
from agentd.services.kernels import KernelService

log = structlog.get_logger()

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
RETRY_PAUSE_S = 1.0


class Monitor:
    """The loops of the daemon."""

    def __init__(self, service: KernelService, adoption: Adoption, plugins: Plugins) -> None:
        self._service = service
        self._adoption = adoption
        self._plugins = plugins

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as group:
            for runtime in self._service.runtimes.values():
                group.create_task(self._follow(runtime), name=f"follow-{runtime.name}")
            group.create_task(self._forever(self._look_again), name="look-again")
            group.create_task(self._forever(self._retry), name="retry")
            group.create_task(self._forever(self._watch_devices), name="watch-devices")

    async def _forever(self, loop: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await loop()
            except Exception:
                log.exception("monitor.failed", loop=loop.__name__)
                await asyncio.sleep(LONGEST_PAUSE_S)

    async def _follow(self, runtime: Runtime) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async for kernel_id in runtime.follow():
                    if kernel_id:
                        self._service.operations.look_again(kernel_id)
                    else:
                        self._adoption.listening.add(runtime.name)
                        await self._adoption.relist(runtime)
                        pause_s = FIRST_PAUSE_S
                reason = "its events ended"
            except RuntimeUnavailable as error:
                reason = str(error)
            except Exception as error:
                log.exception("monitor.failed", loop=f"follow {runtime.name}")
                reason = f"{type(error).__name__}: {error}"
            self._adoption.listening.discard(runtime.name)
            self._adoption.unavailable(runtime.name, reason)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _look_again(self) -> None:
        while True:
            kernel_id = await self._service.operations.to_look_at()
            try:
                await self._adoption.observe(kernel_id)
            except Exception:
                self._service.operations.look_again(kernel_id)
                raise

    async def _retry(self) -> None:
        while True:
            await asyncio.sleep(RETRY_PAUSE_S)
            await self._adoption.retry()

    async def _watch_devices(self) -> None:
        told = {status.name: status for status in self._plugins.statuses()}
        async for name in self._plugins.changes():
            self._service.devices.refresh(name)
            for status in self._plugins.statuses():
                if status.name == name and status != told.get(name):
                    told[name] = status
                    self._service.events.publish(EventKind.PLUGIN, status)
