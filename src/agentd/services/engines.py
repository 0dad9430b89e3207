"""Engines that this node waits for after a boot, and the conditions that engines report.

What an engine gave to its own work before a boot is unknown until it has compared. Its devices are
not allocated meanwhile; the engine can claim them as observed. Any engine may report conditions,
which last until it replaces them or agentd restarts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from agentd.core.conditions import Condition
from agentd.core.devices import DeviceId, Inventory
from agentd.core.groups import group
from agentd.core.kernel.states import KERNEL_ID
from agentd.core.slots import CPU, MEM
from agentd.errors import UnknownEngine
from agentd.services.devices import NodeDevices
from agentd.state.folder import StateFolder

EngineDevices: TypeAlias = Literal["all"] | Mapping[str, Sequence[str]]
"""All accelerators, or ids, stable ids or aliases by device name."""
MAX_REPORTING = 32
"""Maximum number of engines outside the configuration."""


class EngineStatus(msgspec.Struct, frozen=True):
    """An engine, whether it is ready in this boot, and its devices by device name."""

    engine: str
    is_ready: bool
    devices: Mapping[str, tuple[str, ...]]


class AwaitedEngines:
    """The engines of the configuration, and others that report conditions."""

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
        self._conditions: dict[str, Sequence[Condition]] = {}
        self._others: dict[str, bool] = {}
        """Whether each engine outside the configuration is ready."""

    def statuses(self) -> list[EngineStatus]:
        """Return every engine, in the order of the configuration, then the reporting ones."""
        return [self._engine_status(engine) for engine in (*self._wanted, *self._others)]

    def reported_conditions(self) -> Iterator[Condition]:
        """Yield the conditions that engines reported last."""
        for conditions in self._conditions.values():
            yield from conditions

    def _engine_status(self, engine: str) -> EngineStatus:
        ids_by_name = group(self._engine_devices(engine, self._devices.inventory))
        devices = {name: tuple(ids) for name, ids in ids_by_name.items()}
        return EngineStatus(engine, self._is_ready(engine), devices)

    def _is_ready(self, engine: str) -> bool:
        return self._others.get(engine, self._ready.get(engine) == self._boot_id)

    def report(
        self, engine: str, *, is_ready: bool, conditions: Sequence[Condition] | None = None
    ) -> EngineStatus:
        """Set whether an engine has compared its devices, and replace its conditions if given.

        Raises:
            UnknownEngine: it is not configured and reports no conditions, its name is not an id, or
                too many others report.
            StateUnavailable: nothing changed.
        """
        if engine in self._wanted:
            self._save_ready(engine, is_ready=is_ready)
        elif conditions is None or not self._may_report(engine):
            available = ", ".join((*self._wanted, *self._others)) or "none"
            raise UnknownEngine(f"unknown engine {engine} (this node has: {available})")
        else:
            self._others[engine] = is_ready
        if conditions is not None:
            self._conditions[engine] = conditions
        return self._engine_status(engine)

    def _may_report(self, engine: str) -> bool:
        has_room = engine in self._others or len(self._others) < MAX_REPORTING
        return has_room and re.fullmatch(KERNEL_ID, engine) is not None

    def _save_ready(self, engine: str, *, is_ready: bool) -> None:
        ready = {name: boot for name, boot in self._ready.items() if name != engine}
        if is_ready:
            ready[engine] = self._boot_id
        self._store.save_ready_engines(ready)
        self._ready = ready
        self._devices.update_withholding()

    def awaited_devices(self, inventory: Inventory) -> dict[DeviceId, str]:
        """Return the devices that wait for an engine, and which one."""
        return {
            device_id: engine
            for engine in self._wanted
            if not self._is_ready(engine)
            for device_id in self._engine_devices(engine, inventory)
        }

    def _engine_devices(self, engine: str, inventory: Inventory) -> list[DeviceId]:
        wanted = self._wanted.get(engine, {})
        return [
            device.device_id
            for device in inventory.devices
            if device.device_id.name not in (CPU, MEM)
            and (
                wanted == "all" or any(map(device.has_name, wanted.get(device.device_id.name, ())))
            )
        ]
