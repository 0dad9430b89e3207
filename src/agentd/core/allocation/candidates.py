"""The devices that may give one slot to one agent, and the order of choice among them.

Room is the largest amount of the slot for which a device also has the amounts of its other slots
free that are derived from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter

import msgspec

from agentd.core.allocation.derivation import available_quanta
from agentd.core.allocation.ledger import Ledger
from agentd.core.devices import Device, DeviceId, Inventory
from agentd.core.groups import group
from agentd.core.partition.split import Partition
from agentd.core.slots import SlotName


class DeviceCandidate(msgspec.Struct, frozen=True):
    """A device that may give a slot: its room now, and if nobody held it, in quanta."""

    device: Device
    room: int
    capacity: int

    @property
    def device_id(self) -> DeviceId:
        """The id of the device."""
        return self.device.device_id


def find_candidates(
    ledger: Ledger,
    inventory: Inventory,
    partition: Partition,
    slot: SlotName,
    named: Sequence[SlotName],
    named_devices: Collection[DeviceId] | None = None,
) -> list[DeviceCandidate]:
    """Return the devices that may give a slot to an agent, in natural order.

    `named` are the slots of the same devices that the request names. From the first, which
    decides, those are derived that it does not name. `named_devices` are the devices to choose
    from; None stands for all.
    """
    candidates = []
    needed, is_deciding = set(named), slot == named[0]
    for device in inventory.by_slot.get(slot, ()):
        measures = inventory.measures[device.device_id]
        may_give = named_devices is None or device.device_id in named_devices
        if not (may_give and device.is_usable and measures.keys() >= needed):
            continue
        underived = named if is_deciding else measures
        if capacity := available_quanta(partition.slot_limits(device), measures, slot, underived):
            free_room = available_quanta(
                ledger.free_amounts(device, partition), measures, slot, underived
            )
            candidates.append(DeviceCandidate(device, free_room, capacity))
    return candidates


def devices_with_room(
    candidates_by_slot: Mapping[SlotName, Iterable[DeviceCandidate]],
    wanted: Mapping[SlotName, int],
    count: int,
) -> set[DeviceId]:
    """Return the devices with room for the larger of `count` equal parts of each slot."""
    fitting = (
        {c.device_id for c in candidates_by_slot[slot] if c.room * count >= amount}
        for slot, amount in wanted.items()
    )
    return set.intersection(*fitting)


def choose_alike(
    alike: Iterable[DeviceCandidate], count: int, inventory: Inventory
) -> list[DeviceCandidate]:
    """Return `count` devices of those with the same room: one of each NUMA node in turn.

    Parts of one device (the threads of a core) are given together, whole devices first. An odd
    count takes from a device in use, the smallest remainder that has enough, then devices of one
    part, before it divides another.
    """
    groups = group((candidate.device.physical_id, candidate) for candidate in alike)
    whole: list[list[DeviceCandidate]] = []
    in_use: list[list[DeviceCandidate]] = []
    for parts in groups.values():
        (whole if _is_whole(parts, inventory) else in_use).append(parts)
    chosen: list[DeviceCandidate] = []
    divisible: list[list[DeviceCandidate]] = []
    for parts in _alternate_nodes(whole):
        if len(parts) > 1 and len(chosen) + len(parts) <= count:
            chosen += parts
        else:
            divisible.append(parts)
    in_use = _alternate_nodes(in_use)
    enough = [parts for parts in in_use if len(chosen) + len(parts) >= count]
    partial = [min(enough, key=len)] if enough else in_use
    return [*chosen, *chain.from_iterable([*partial, *sorted(divisible, key=len)])][:count]


def _alternate_nodes(groups: Iterable[list[DeviceCandidate]]) -> list[list[DeviceCandidate]]:
    """Order groups so that NUMA nodes alternate; those that are near everything come last."""
    counts: Counter[int | None] = Counter()
    ranked = []
    for parts in groups:
        node = parts[0].device.numa_node
        counts[node] += 1
        ranked.append((node is None, counts[node], node or 0, parts))
    return [parts for *_, parts in sorted(ranked, key=itemgetter(0, 1, 2))]


def _is_whole(parts: Sequence[DeviceCandidate], inventory: Inventory) -> bool:
    """Return whether these are all parts of one device that offer their slot."""
    parent, slot = parts[0].device.parent, parts[0].device.slot
    if parent is None:
        return True
    return len(parts) == sum(part.slot == slot for part in inventory.parts[parent])
