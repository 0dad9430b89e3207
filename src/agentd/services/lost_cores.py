"""Cores that kernels cannot run on any more: offline, or not in a cpuset now.

agentd's own affinity tells which of the host's cores are there. A runtime may have fewer: a core on
which a create failed is withheld for `RETRY_S`, and then tried again by a create.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping

from agentd.core.devices import DeviceId
from agentd.core.slots import CPU
from agentd.services.devices import NodeDevices
from agentd.services.protocols import Clock

RETRY_S = 60.0
POLL_PAUSE_S = 5.0
"""Seconds between two scans without a create."""


class LostCores:
    """The lost ones of the cores that this host had at the start."""

    def __init__(
        self,
        devices: NodeDevices,
        real_cores: frozenset[str],
        available: Callable[[], Collection[int]],
        clock: Clock,
    ) -> None:
        self._devices = devices
        self._real_cores = real_cores
        self._available = available
        self._clock = clock
        self._missing: frozenset[str] = frozenset()
        self._failed: Mapping[str, float] = {}
        """The end of the pause of each core on which a create failed."""

    @property
    def reasons(self) -> Mapping[DeviceId, str]:
        """The reasons why cores are not allocated."""
        failed = dict.fromkeys(self._failed, "a kernel could not be started on it")
        missing = dict.fromkeys(self._missing, "it is offline, or outside of agentd's cpuset")
        return {DeviceId(CPU, core): reason for core, reason in (failed | missing).items()}

    def scan(self) -> None:
        """Look which cores are there, and end pauses."""
        now = self._clock.steady()
        self._set(
            self._real_cores.difference(map(str, self._available())),
            {core: until for core, until in self._failed.items() if now < until},
        )

    def withhold(self, cores: Iterable[str]) -> bool:
        """Withhold cores on which a create failed: the missing ones, or else all of them.

        Returns:
            Whether one of them was not withheld before.
        """
        before = {device_id.id for device_id in self.reasons}
        self.scan()
        if self._missing.isdisjoint(cores):
            until = self._clock.steady() + RETRY_S
            self._set(self._missing, {**self._failed, **dict.fromkeys(cores, until)})
        return not before.issuperset(device_id.id for device_id in self.reasons)

    def _set(self, missing: frozenset[str], failed: Mapping[str, float]) -> None:
        if (missing, failed) != (self._missing, self._failed):
            self._missing, self._failed = missing, failed
            self._devices.update_withholding()

    async def run(self) -> None:
        """Scan repeatedly, until cancelled."""
        while True:
            self.scan()
            await asyncio.sleep(POLL_PAUSE_S)
