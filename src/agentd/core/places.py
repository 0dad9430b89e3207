"""The places of devices in the order in which they are dealt to agents.

A device has a place of its own, and keeps it while it is missing. A new device that has the PCI
address (its own or its parent's) and the slots of a missing one takes over its place, and keeps
that, also after the missing one is forgotten. So a card that is replaced moves no other device to
another agent. The missing one has its place again if it returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from agentd.core.devices import Device, Inventory, Place, natural_key
from agentd.core.groups import group


def take_places(added: Iterable[Device], others: Iterable[Device]) -> list[Device]:
    """Return new devices, with the places of the missing ones that they replace."""
    free = [holders[-1] for holders in _by_place(others) if all(d.gone for d in holders)]
    places = group((address, missing.place) for missing in free for address in _addresses(missing))
    taken: set[Place] = set()
    placed = []
    for device in added:
        found = (place for address in _addresses(device) for place in places.get(address, ()))
        place = next((place for place in found if place not in taken), None)
        taken |= {place} if place else set()
        placed.append(replace(device, taken_place=place))
    return placed


def place_new_devices(inventory: Inventory, before: Inventory) -> Inventory:
    """Return an inventory in which the devices that are listed since `before` take free places."""
    added = inventory.listed.keys() - before.listed.keys()
    if not added:
        return inventory
    new = [device for device in inventory.devices if device.device_id in added]
    others = [device for device in inventory.devices if device.device_id not in added]
    return Inventory.of(inventory.slot_types.values(), [*others, *take_places(new, others)])


def in_places(devices: Iterable[Device]) -> list[Device]:
    """Return devices in the order of their places, one in each.

    A missing device whose place another one has is left out. If the device that had a place first
    returns beside its successor, the successor has its own place.
    """
    placed = []
    for holders in _by_place(devices):
        present = [device for device in holders if not device.gone] or holders[-1:]
        first, *others = sorted(present, key=lambda device: device.taken_place is not None)
        placed += [first, *(replace(device, taken_place=None) for device in others)]
    return sorted(placed, key=_order)


def _by_place(devices: Iterable[Device]) -> list[list[Device]]:
    return [*group(((d.device_id.name, d.place), d) for d in devices).values()]


def _order(device: Device) -> tuple[object, ...]:
    place, device_id = device.place, device.device_id
    return natural_key(device_id.name), natural_key(place.id), natural_key(device_id.id)


def _addresses(device: Device) -> Iterator[tuple[object, ...]]:
    for address in (*device.aliases, *device.parent_aliases):
        yield device.device_id.name, device.slot_names, address
