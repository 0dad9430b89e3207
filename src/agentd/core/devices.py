"""Devices, and their identity over restarts.

A device has two names. Its id (`cuda0`) is for people and unique under one device name. Its stable
id (a UUID, a PCI address) is the physical device, unique on the node, and decides which kernel is
charged. The inventory remembers which stable id had which id. So neither a changed driver order nor
a missing GPU renames any other device or moves it to another agent.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from agentd.core.groups import group
from agentd.core.hardware_names import by_normal_names, normal_name, normal_names
from agentd.core.slots import (
    CPU,
    MEM,
    SlotKind,
    SlotMeasure,
    SlotName,
    SlotType,
)

_DIGITS = re.compile(r"([0-9]+)")
_LAST_NUMBER = re.compile(r"[0-9]+[^0-9]*$")
ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")
"""The pattern of ids and stable ids, which appear unchanged in labels and records."""


class DeviceId(NamedTuple):
    """Identifies one device on the node: its device name, and its id under that name."""

    name: str
    id: str

    def __str__(self) -> str:
        return f"{self.name}/{self.id}"


MEMORY = DeviceId("mem", "root")
"""The node's memory, the only device that is divided by amount."""


class Health(StrEnum):
    """The health of a device according to its plugin; `unknown` is not `unhealthy`."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key under which `cuda2` comes before `cuda10`."""
    return tuple(
        (0, int(part), part) if part.isdigit() else (1, 0, part)
        for part in _DIGITS.split(text)
        if part
    )


class SecondarySlot(msgspec.Struct, frozen=True):
    """A slot that a device offers beside its primary one; `capacity` is in base units."""

    slot: SlotName
    kind: SlotKind
    capacity: int


class Place(msgspec.Struct, frozen=True):
    """The place of a device in the order of dealing, by the device that had it first."""

    id: str
    stable_id: str


class Device(msgspec.Struct, frozen=True, dict=True):
    """One physical unit; `capacity` is in base units of its primary `slot`."""

    device_id: DeviceId
    stable_id: str
    slot: SlotName
    kind: SlotKind
    capacity: int
    numa_node: int | None = None
    aliases: tuple[str, ...] = ()
    parent: str | None = None
    parent_aliases: tuple[str, ...] = ()
    model: str = ""
    health: Health = Health.HEALTHY
    reason: str = ""
    gone: bool = False
    drained: bool = False
    awaited: str = ""
    """The engine that has to compare its devices before this one is allocated, if any."""
    busy: str = ""
    """The unclaimed process that uses it, where such a device is not allocated."""
    withheld: str = ""
    """Why another agentd on this host serves it, or may do so; empty if none does."""
    unserved: str = ""
    """Why its plugin, which listed it, does not serve it now."""
    is_excluded: bool = False
    """Whether the configuration keeps it from all agents."""
    attributes: Mapping[str, str] = {}
    former: tuple[str, ...] = ()
    """Earlier stable ids of the same physical device."""
    is_hearsay: bool = False
    """Known only from a kernel's record: listed as `gone` and never saved."""
    is_simulated: bool = False
    """Not hardware: another daemon's device with the same stable id is a different one."""
    secondary: tuple[SecondarySlot, ...] = ()
    """Further slots of the same device, in natural order of their names."""
    files: tuple[str, ...] = ()
    """Device nodes of this device alone, as of the present listing."""
    needs_clear: str = ""
    """Why it is unhealthy until an operator clears it, also over restarts of its plugin."""
    taken_place: Place | None = None
    """The place of the missing device that it replaced, if it did."""

    @property
    def place(self) -> Place:
        """The place that it took over, or its own."""
        return self.taken_place or Place(self.device_id.id, self.stable_id)

    @property
    def is_real_accelerator(self) -> bool:
        """Whether it is hardware that only one agentd on the host serves."""
        return self.device_id.name not in (CPU, MEM) and not self.is_simulated

    @cached_property
    def slot_names(self) -> tuple[SlotName, ...]:
        """The slots that it offers, the primary one first."""
        return self.slot, *[other.slot for other in self.secondary]

    @property
    def slots(self) -> tuple[SecondarySlot, ...]:
        """The slots that it offers with their capacities, the primary one first."""
        return SecondarySlot(self.slot, self.kind, self.capacity), *self.secondary

    def capacity_of(self, slot: SlotName) -> int:
        """Return the capacity of one of its slots, in base units; 0 of a slot it lacks."""
        return next((offer.capacity for offer in self.slots if offer.slot == slot), 0)

    @property
    def is_usable(self) -> bool:
        """Whether it can be allocated, apart from free capacity."""
        return self._is_there and not (self.drained or self.awaited or self.busy)

    @property
    def withheld_reason(self) -> str:
        """Why it is not offered, whatever its health; empty if it is."""
        if self.is_excluded:
            return f"excluded in [plugins.{self.device_id.name}]"
        return self.withheld or self.unserved

    @cached_property
    def offered_capacities(self) -> tuple[int, ...]:
        """The capacities by slot, the primary one first; 0 if missing, unhealthy or withheld."""
        capacities = self.capacity, *[other.capacity for other in self.secondary]
        return capacities if self._is_there else (0,) * len(capacities)

    @property
    def _is_there(self) -> bool:
        return not (self.gone or self.withheld_reason or self.health is Health.UNHEALTHY)

    @property
    def physical_id(self) -> str:
        """The stable id of the physical device that it is, or is a part of."""
        return self.parent or self.stable_id

    def physical_keys(self) -> set[str]:
        """Return all names under which another plugin might list the same device."""
        keys = (self.stable_id, self.parent, *self.aliases, *self.parent_aliases)
        return {key for key in keys if key}

    def has_name(self, name: str) -> bool:
        """Return whether `name` is its id, its stable id or an alias."""
        names = normal_names(self.device_id.id, self.stable_id, *self.aliases)
        return normal_name(name) in names


class Withholding(msgspec.Struct, frozen=True):
    """Why devices are not allocated for now, by what withholds them."""

    elsewhere: str = ""
    """Why another agentd may serve the real accelerators, if it does."""
    lost: Mapping[DeviceId, str] = {}
    """Cores that the host has no more."""
    awaited: Mapping[DeviceId, str] = {}
    """The engine that has to compare them first."""
    busy: Mapping[DeviceId, str] = {}
    """The unclaimed process that uses them."""


class Inventory(msgspec.Struct, frozen=True, eq=False, dict=True):
    """All devices of the node in natural order, and its slot types.

    Compared by identity: a changed inventory is another one.
    """

    slot_types: Mapping[SlotName, SlotType]
    devices: tuple[Device, ...]

    @classmethod
    def of(cls, slot_types: Iterable[SlotType], devices: Iterable[Device]) -> Inventory:
        """Return an inventory with sorted devices."""
        ordered = sorted(
            devices, key=lambda d: (natural_key(d.device_id.name), natural_key(d.device_id.id))
        )
        return cls({slot.name: slot for slot in slot_types}, tuple(ordered))

    @cached_property
    def by_id(self) -> Mapping[DeviceId, Device]:
        return {device.device_id: device for device in self.devices}

    @cached_property
    def listed(self) -> Mapping[DeviceId, Sequence[SecondarySlot]]:
        """The slots of all but the devices that are known only from a kernel's record."""
        return {d.device_id: d.slots for d in self.devices if not d.is_hearsay}

    @cached_property
    def by_stable_id(self) -> Mapping[str, Device]:
        return {device.stable_id: device for device in self.devices}

    @cached_property
    def by_identity(self) -> Mapping[str, Device]:
        """Devices by stable id, else by a former stable id, else by alias."""
        devices = _by_alias(self.devices)
        for device in self.devices:
            devices |= dict.fromkeys(device.former, device)
        return {**devices, **self.by_stable_id}

    @cached_property
    def parts(self) -> Mapping[str, list[Device]]:
        """The parts of each physical device that is listed in parts, by its stable id."""
        return group((device.parent, device) for device in self.devices if device.parent)

    @cached_property
    def by_slot(self) -> Mapping[SlotName, list[Device]]:
        return group((slot, device) for device in self.devices for slot in device.slot_names)

    @cached_property
    def by_name(self) -> Mapping[str, list[Device]]:
        return group_by_name(self.devices)

    def quantum(self, slot: SlotName) -> int:
        """Return the quantum of a slot; 1 if only a missing device offers it."""
        known = self.slot_types.get(slot)
        return known.quantum if known else 1

    @cached_property
    def measures(self) -> Mapping[DeviceId, Mapping[SlotName, SlotMeasure]]:
        """The measures of the slots of each device, the primary one first."""
        return {
            device.device_id: {
                offer.slot: SlotMeasure(position, quantum, offer.capacity // quantum * quantum)
                for position, offer in enumerate(device.slots)
                for quantum in [self.quantum(offer.slot)]
            }
            for device in self.devices
        }

    def with_device(self, device: Device) -> Inventory:
        """Return an inventory in which `device` replaces the one with its id."""
        others = self.without(device.device_id).devices
        return Inventory.of(self.slot_types.values(), (*others, device))

    def with_cleared(self, cleared: Device) -> Inventory:
        """Return the inventory without what was cleared of a device and of its whole."""
        return self.with_devices(
            replace(device, needs_clear="")
            if (device.physical_id, device.needs_clear)
            == (cleared.physical_id, cleared.needs_clear)
            else device
            for device in self.devices
        )

    def with_withheld(self, by: Withholding, unserved: Mapping[str, str] = {}) -> Inventory:
        """Return the inventory in which exactly these devices are withheld.

        No plugin serves the `unserved` device names.
        """
        reasons = {d.device_id: by.elsewhere for d in self.devices if d.is_real_accelerator}
        reasons |= by.lost
        return self.with_devices(
            replace(
                device,
                withheld=reasons.get(device.device_id, ""),
                awaited=by.awaited.get(device.device_id, ""),
                busy=by.busy.get(device.device_id, ""),
                unserved=unserved.get(device.device_id.name, ""),
            )
            for device in self.devices
        )

    def with_excluded(self, exclude: Mapping[str, Collection[str]]) -> Inventory:
        """Return the inventory in which exactly these devices are excluded, by device name."""
        pairs = ((self.by_name.get(name, ()), entries) for name, entries in exclude.items())
        named = set().union(*(named_devices(devices, entries) for devices, entries in pairs))
        return self.with_devices(
            replace(device, is_excluded=device.device_id in named) for device in self.devices
        )

    def with_health_unknown(
        self, name: str, reason: str, *, keeps_unhealthy: bool = True
    ) -> Inventory:
        """Return the inventory with unknown health of one device name.

        By default unhealthy devices stay so: the loss of the plugin does not repair them.
        """
        return self.with_devices(
            replace(device, health=Health.UNKNOWN, reason=reason)
            if device.device_id.name == name
            and not device.gone
            and not (keeps_unhealthy and device.health is Health.UNHEALTHY)
            else device
            for device in self.devices
        )

    def with_devices(self, devices: Iterable[Device]) -> Inventory:
        """Return the inventory with these devices; the same one if nothing changed."""
        changed = Inventory.of(self.slot_types.values(), with_shared_health([*devices]))
        return self if changed.devices == self.devices else changed

    def without(self, device_id: DeviceId) -> Inventory:
        """Return an inventory without `device_id`."""
        others = (d for d in self.devices if d.device_id != device_id)
        return Inventory.of(self.slot_types.values(), others)


def by_any_name(devices: Collection[Device]) -> dict[str, Device]:
    """Return devices by the normal forms of their ids, else stable ids, else aliases."""
    by_stable_id = by_normal_names({device.stable_id: device for device in devices})
    by_id = by_normal_names({device.device_id.id: device for device in devices})
    return by_normal_names(_by_alias(devices)) | by_stable_id | by_id


def named_devices(devices: Collection[Device], names: Iterable[str]) -> set[DeviceId]:
    """Return the devices of one device name that have one of `names`, and all parts of them.

    A part is also named by its id up to the colon (`cuda1` of `cuda1:0`), if no device has that id.
    """
    ids = {device.device_id.id for device in devices}
    named = set()
    for name in names:
        whole = {device.stable_id for device in devices if device.has_name(name)}
        named |= {
            device.device_id
            for device in devices
            if device.stable_id in whole
            or device.parent in whole
            or normal_name(name) in normal_names(device.parent or "", *device.parent_aliases)
            or (device.parent and name not in ids and device.device_id.id.startswith(f"{name}:"))
        }
    return named


def _by_alias(devices: Iterable[Device]) -> dict[str, Device]:
    """Return devices by alias; a present one before a missing one, as in a PCI slot."""
    by_alias: dict[str, Device] = {}
    for device in sorted(devices, key=lambda device: not device.gone):
        by_alias |= dict.fromkeys(device.aliases, device)
    return by_alias


def group_by_name(devices: Iterable[Device]) -> dict[str, list[Device]]:
    """Return devices by device name."""
    return group((device.device_id.name, device) for device in devices)


def with_shared_health(devices: Sequence[Device]) -> list[Device]:
    """Mark the parts of an unhealthy device as unhealthy; a part never affects the others."""
    unhealthy_by_id = {
        device.stable_id: device
        for device in devices
        if device.health is Health.UNHEALTHY and not device.gone
    }
    return [
        replace(device, health=Health.UNHEALTHY, reason=f"{cause.device_id}: {cause.reason}")
        if (cause := unhealthy_by_id.get(device.parent or "")) is not None
        and device.health is not Health.UNHEALTHY
        else device
        for device in devices
    ]


def assign_free_ids(added: Iterable[Device], taken: set[DeviceId]) -> list[Device]:
    """Return new devices under ids that no other device has."""
    devices = []
    for device in added:
        device_id = _next_free_id(device.device_id, taken)
        taken.add(device_id)
        devices.append(replace(device, device_id=device_id))
    return devices


def _next_free_id(wanted: DeviceId, taken: set[DeviceId]) -> DeviceId:
    """Return the wanted id, or the next one with a free number."""
    stem, count = _LAST_NUMBER.sub("", wanted.id) or wanted.name, 0
    device_id = wanted
    while device_id in taken:
        device_id = DeviceId(wanted.name, f"{stem}{count}")
        count += 1
    return device_id
