"""The shapes of the files in the state folder, checked as they are read.

A newer agentd may have written further members; those are skipped. What is not of its
shape raises, so that no damaged value goes any further than this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import msgspec

from agentd.core.devices import Device, DeviceId, Health
from agentd.core.record import DAMAGE
from agentd.core.slots import SlotKind

SCHEMA = 1
UNREADABLE = (*DAMAGE, msgspec.MsgspecError)
"""What reading a damaged file raises."""


class SavedNode(msgspec.Struct):
    """`node.json`: the node id that the kernels here carry, and which runtimes have some."""

    node_id: str
    runtimes: list[str]
    schema: int = SCHEMA


class SavedIntent(msgspec.Struct):
    """One of `intents/`: a create that a runtime was asked for; `record` as on the kernel."""

    runtime: str
    record: str
    schema: int = SCHEMA


class SavedDevice(msgspec.Struct):
    """A device as it was last seen; `capacity` is in base units of its slot."""

    name: str
    id: str
    stable_id: str
    slot: str
    kind: SlotKind
    capacity: int
    numa_node: int | None
    aliases: tuple[str, ...]
    parent: str | None
    model: str
    drained: bool
    former: tuple[str, ...] = ()

    @classmethod
    def of(cls, device: Device) -> Self:
        """Return what is remembered of a device."""
        return cls(
            name=device.device_id.name,
            id=device.device_id.id,
            stable_id=device.stable_id,
            slot=device.slot,
            kind=device.kind,
            capacity=device.capacity,
            numa_node=device.numa_node,
            aliases=device.aliases,
            parent=device.parent,
            model=device.model,
            drained=device.drained,
            former=device.former,
        )

    def device(self) -> Device:
        """Return the device; how it does is not known before it is listed again."""
        return Device(
            device_id=DeviceId(self.name, self.id),
            stable_id=self.stable_id,
            slot=self.slot,
            kind=self.kind,
            capacity=self.capacity,
            numa_node=self.numa_node,
            aliases=self.aliases,
            parent=self.parent,
            model=self.model,
            health=Health.UNKNOWN,
            drained=self.drained,
            former=self.former,
        )


class SavedDevices(msgspec.Struct):
    """`devices.json`: the last inventory."""

    devices: Sequence[SavedDevice]
    schema: int = SCHEMA
