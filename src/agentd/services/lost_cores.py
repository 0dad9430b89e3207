"""Cores that kernels cannot run on any more: offline, or not in a cpuset now.

agentd's own affinity tells which of the host's cores are there. A runtime may have fewer: a core on
which a create failed is withheld for `RETRY_S`, and then tried again by a create.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from agentd.core.devices import DeviceId
from agentd.core.slots import CPU
from agentd.services.devices import NodeDevices

RETRY_S = 60.0
POLL_PAUSE_S = 5.0
"""Seconds between two scans without a create."""
_MISSING = "it is offline, or outside of agentd's cpuset"
_FAILED = "a kernel could not be started on it"


class LostCores:
    """The lost ones of the cores that this host had at the start, with the reasons."""

    def __init__(
        self,
        devices: NodeDevices,
        real_cores: frozenset[str],
        available: Callable[[], Collection[int]],
        clock: Callable[[], float],
    ) -> None:
        self._reasons: Mapping[DeviceId, str] = {}
        self._devices = devices
        self._real_cores = real_cores
        self._available = available
        self._clock = clock
        self._pauses: dict[str, float] = {}

    @property
    def reasons(self) -> Mapping[DeviceId, str]:
        """Why cores are not allocated."""
        return self._reasons

    def scan(self, failed: Collection[str] = ()) -> None:
        """Look which cores are there, and withhold the others.

        A create `failed` on cores that its runtime does not have.
        """
        now, before = self._clock(), self._reasons
        missing = self._real_cores.difference(map(str, self._available()))
        self._pauses = {core: until for core, until in self._pauses.items() if now < until}
        self._pauses |= dict.fromkeys({*failed} - missing, now + RETRY_S)
        reasons = dict.fromkeys(self._pauses, _FAILED) | dict.fromkeys(missing, _MISSING)
        self._reasons = {DeviceId(CPU, core): reason for core, reason in reasons.items()}
        if self._reasons != before:
            self._devices.update_withholding()

    async def run(self) -> None:
        """Scan repeatedly, until cancelled."""
        while True:
            self.scan()
            await asyncio.sleep(POLL_PAUSE_S)
