"""Processes on devices that no kernel or claim holds, as the driver of the device lists them.

They count once a device has been used for `MIN_USE_S` without a pause, by any processes, since a
holder may end a moment before its processes do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

import structlog

from agentd.core.conditions import Condition
from agentd.core.devices import DeviceId
from agentd.services.node import Node
from agentd.services.protocols import Plugins

log = structlog.get_logger()

MIN_USE_S = 10.0
"""Seconds that processes use a device before they count."""
MAX_SHOWN = 8
"""Maximum process ids in a condition and in a line of the log."""
POLL_PAUSE_S = 1.0
"""Seconds between two scans."""


class UnclaimedProcesses:
    """The unclaimed processes by device, at the last scan."""

    def __init__(
        self,
        node: Node,
        plugins: Plugins,
        clock: Callable[[], float],
        *,
        withholds: bool,
    ) -> None:
        """With `withholds` their devices are not allocated."""
        self._state, self._devices = node.state, node.devices
        self._plugins = plugins
        self._clock = clock
        self._withholds = withholds
        self._first_seen: dict[DeviceId, float] = {}
        self._pids_by_device: dict[DeviceId, tuple[int, ...]] = {}

    @property
    def pids_by_device(self) -> Mapping[DeviceId, Sequence[int]]:
        """Process ids by device."""
        return self._pids_by_device

    @property
    def busy_reasons(self) -> Mapping[DeviceId, str]:
        """The reasons why devices are not allocated; none unless they are to be withheld."""
        if not self._withholds:
            return {}
        return {device_id: _reason(pids) for device_id, pids in self._pids_by_device.items()}

    def conditions(self) -> Iterator[Condition]:
        """Yield a condition for each device."""
        for device_id, pids in self._pids_by_device.items():
            reason = f"device {device_id}: {_reason(pids)}"
            yield Condition(f"device/{device_id}", reason, "end it, or claim the device for it")

    async def run(self) -> None:
        """Scan repeatedly, until cancelled."""
        while True:
            self.scan()
            await asyncio.sleep(POLL_PAUSE_S)

    def scan(self) -> None:
        """Compare the processes that drivers list with the ledger."""
        now = self._clock()
        uses = dict(sorted(self._unclaimed_uses()))
        self._first_seen = {device_id: self._first_seen.get(device_id, now) for device_id in uses}
        pids_by_device = {
            device_id: pids
            for device_id, pids in uses.items()
            if now - self._first_seen[device_id] >= MIN_USE_S
        }
        if pids_by_device == self._pids_by_device:
            return
        for device_id in pids_by_device.keys() - self._pids_by_device.keys():
            pids = pids_by_device[device_id]
            shown, count = list(pids[:MAX_SHOWN]), len(pids)
            log.warning("device.used_unclaimed", device=str(device_id), pids=shown, count=count)
        self._pids_by_device = pids_by_device
        self._devices.update_withholding()

    def _unclaimed_uses(self) -> Iterator[tuple[DeviceId, tuple[int, ...]]]:
        """Yield each device without a holder that processes use, with their ids."""
        by_stable_id, held_devices = (
            self._devices.inventory.by_stable_id,
            self._state.ledger.shares_by_device,
        )
        for measurements in self._plugins.measurements().values():
            for item in measurements:
                device = by_stable_id.get(item.stable_id)
                if device is None or device.is_excluded:
                    continue
                if item.processes and device.device_id not in held_devices:
                    yield device.device_id, tuple(sorted({use.pid for use in item.processes}))


def _reason(pids: Sequence[int]) -> str:
    word = "process" if len(pids) == 1 else "processes"
    shown = ", ".join(map(str, pids[:MAX_SHOWN]))
    further = f" and {len(pids) - MAX_SHOWN} more" if len(pids) > MAX_SHOWN else ""
    return f"used by {word} {shown}{further} without a claim"
