"""Engines that this node waits for after a boot.

What an engine gave to its own work before a boot is unknown until it has compared. Its devices are
not allocated meanwhile; the engine can claim them as observed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from agentd.core.devices import DeviceId, Inventory
from agentd.core.groups import group
from agentd.core.slots import CPU, MEM
from agentd.errors import UnknownEngine
from agentd.services.devices import NodeDevices
from agentd.state.folder import StateFolder

EngineDevices: TypeAlias = Literal["all"] | Mapping[str, Sequence[str]]
"""All accelerators, or ids, stable ids or aliases by device name."""


class EngineStatus(msgspec.Struct, frozen=True):
    """An engine, whether it is ready in this boot, and its devices by device name."""

    engine: str
    is_ready: bool
    devices: Mapping[str, tuple[str, ...]]


class AwaitedEngines:
    """The engines of the configuration."""

    def __init__(
        self,
        devices: NodeDevices,
        store: StateFolder,
        boot_id: str,
        wanted: Mapping[str, EngineDevices],
    ) -> None:
        self._devices = devices
        self._store = store
        self._boot_id = boot_id
        self._wanted = dict(wanted)
        self._ready = dict(store.load_ready_engines())

    def statuses(self) -> list[EngineStatus]:
        """Return every engine, in the order of the configuration."""
        return [self._engine_status(engine) for engine in self._wanted]

    def _engine_status(self, engine: str) -> EngineStatus:
        ids_by_name = group(self._engine_devices(engine, self._devices.inventory))
        devices = {name: tuple(ids) for name, ids in ids_by_name.items()}
        return EngineStatus(engine, self._is_ready(engine), devices)

    def _is_ready(self, engine: str) -> bool:
        return self._ready.get(engine) == self._boot_id

    def set_ready(self, engine: str, *, is_ready: bool) -> EngineStatus:
        """Set whether an engine has compared its devices with the claims.

        Raises:
            UnknownEngine: the configuration has none of that name.
            StateUnavailable: nothing changed.
        """
        if engine not in self._wanted:
            available = ", ".join(self._wanted) or "none"
            raise UnknownEngine(f"unknown engine {engine} (this node has: {available})")
        ready = {name: boot for name, boot in self._ready.items() if name != engine}
        if is_ready:
            ready[engine] = self._boot_id
        self._store.save_ready_engines(ready)
        self._ready = ready
        self._devices.update_withholding()
        return self._engine_status(engine)

    def awaited_devices(self, inventory: Inventory) -> dict[DeviceId, str]:
        """Return the devices that wait for an engine, and which one."""
        return {
            device_id: engine
            for engine in self._wanted
            if not self._is_ready(engine)
            for device_id in self._engine_devices(engine, inventory)
        }

    def _engine_devices(self, engine: str, inventory: Inventory) -> list[DeviceId]:
        wanted = self._wanted[engine]
        return [
            device.device_id
            for device in inventory.devices
            if device.device_id.name not in (CPU, MEM)
            and (
                wanted == "all" or any(map(device.has_name, wanted.get(device.device_id.name, ())))
            )
        ]
