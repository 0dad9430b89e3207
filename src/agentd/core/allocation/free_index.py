"""The free index: the devices that may give one slot to one agent, by room.

Room is the largest amount of the slot for which a device also has the amounts of its other slots
free that are derived from it. All indexes of the slots of one primary slot have the same devices at
the same positions, so that their sets of bits can be intersected.

Devices alike (the same room, the same NUMA node) are one set of bits: bit i is the device
at position i of the natural order. The first of them is the lowest bit, how many there are
is a count of bits, and a device that is given or comes back moves from one set to another.
So neither choosing nor keeping up costs more for devices that a request does not touch.

Immutable: `with_rooms` returns the index after a change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from agentd.core.allocation.derivation import SlotMeasure
from agentd.core.allocation.distribute import Portion, Rooms
from agentd.core.devices import Device, DeviceId

_T = TypeVar("_T")
Buckets: TypeAlias = dict[int | None, dict[int, int]]
"""By NUMA node and by room in quanta: the positions of the devices, as bits."""
Sizes: TypeAlias = Sequence[tuple[int, int]]
"""By the most that the agent may hold, in quanta, smallest first: the positions, as bits."""
Siblings: TypeAlias = Sequence[int]
"""Devices that are parts of one (the threads of a core), as bits, where there are several."""


class FreeIndex(msgspec.Struct, frozen=True, eq=False):
    """Devices in natural order, and the room on each in quanta.

    `sizes` are the devices, as bits, by the most that the agent may hold of each, smallest first.
    `siblings` are those that are parts of one physical device. `measures` has for each device its
    slot and those that are derived from it; a device without the slot has none.
    """

    devices: tuple[Device, ...]
    positions: Mapping[DeviceId, int]
    sizes: Sizes
    quantum: int
    buckets: Buckets
    siblings: Siblings = ()
    measures: tuple[tuple[SlotMeasure, ...], ...] = ()

    def only(self, device_ids: Collection[DeviceId]) -> FreeIndex:
        """Return the index of some of the devices."""
        there = [self.positions[d] for d in device_ids if d in self.positions]
        bits = sum(1 << position for position in there)
        sizes = tuple((size, some) for size, found in self.sizes if (some := found & bits))
        return replace(self, sizes=sizes, buckets=among(self.buckets, bits))

    @property
    def capacities(self) -> Rooms:
        """The limits of devices, each with the number of devices that have it."""
        return [(size, found.bit_count()) for size, found in self.sizes]

    def with_room_for(self, quanta: int) -> int:
        """Return the positions of the devices that have so much room, as bits."""
        bits = 0
        for by_room in self.buckets.values():
            for room, found in by_room.items():
                if room >= quanta:
                    bits |= found
        return bits

    def with_rooms(self, changes: Iterable[tuple[int, int, int]]) -> FreeIndex:
        """Return the index after changes: position, room before, room now."""
        buckets = {node: dict(by_room) for node, by_room in self.buckets.items()}
        for position, before, now in changes:
            by_room = buckets.setdefault(self.devices[position].numa_node, {})
            bit = 1 << position
            if before:
                by_room[before] ^= bit
                if not by_room[before]:
                    del by_room[before]
            if now:
                by_room[now] = by_room.get(now, 0) | bit
        return replace(self, buckets={node: found for node, found in buckets.items() if found})


def sizes(limits: Iterable[int]) -> Sizes:
    """Return devices by the most that the agent may hold of them; those with nothing left out."""
    found: dict[int, int] = {}
    for position, limit in enumerate(limits):
        if limit:
            found[limit] = found.get(limit, 0) | 1 << position
    return tuple(sorted(found.items()))


def siblings(devices: Iterable[Device]) -> Siblings:
    """Return the devices that have the same parent, where there are several."""
    masks: dict[str, int] = {}
    for position, device in enumerate(devices):
        if device.parent is not None:
            masks[device.parent] = masks.get(device.parent, 0) | 1 << position
    return [mask for mask in masks.values() if mask.bit_count() > 1]


def among(buckets: Buckets, positions: int) -> Buckets:
    """Return the part of the buckets that is at these positions (bits)."""
    found = {
        node: {room: some for room, bits in by_room.items() if (some := bits & positions)}
        for node, by_room in buckets.items()
    }
    return {node: by_room for node, by_room in found.items() if by_room}


def count_of(buckets: Buckets) -> int:
    """Return how many devices there are."""
    return sum(bits.bit_count() for by_room in buckets.values() for bits in by_room.values())


def rooms(buckets: Buckets) -> Rooms:
    """Return how many devices have which room."""
    counts: dict[int, int] = {}
    for by_room in buckets.values():
        for room, bits in by_room.items():
            counts[room] = counts.get(room, 0) + bits.bit_count()
    return sorted(counts.items())


def total(buckets: Buckets) -> int:
    """Return all the room there is."""
    return sum(
        room * bits.bit_count() for found in buckets.values() for room, bits in found.items()
    )


def given(
    buckets: Buckets, parts: Collection[Portion], siblings: Siblings = ()
) -> Iterator[tuple[int, int]]:
    """Yield (position, quanta) for each device that gives a part."""
    counts: dict[int, int] = {}
    for part in parts:
        counts[part.room] = counts.get(part.room, 0) + part.devices
    queues: dict[int, Iterator[int]] = {}
    for part in parts:
        if (queue := queues.get(part.room)) is None:
            found = {node: bits for node, of in buckets.items() if (bits := of.get(part.room))}
            count = counts[part.room]
            queue = _together(found, count, siblings) if siblings else _in_turn(found)
            queues[part.room] = queue
        for _ in range(part.devices):
            yield next(queue), part.amount


def _in_turn(found: Mapping[int | None, int]) -> Iterator[int]:
    """Yield devices that are alike: one of each NUMA node in turn, in natural order.

    Devices that are near everything come after those that have a node.
    """
    anywhere = found.get(None, 0)
    nodes = sorted(node for node in found if node is not None)
    yield from _alternating([_positions(found[node]) for node in nodes])
    yield from _positions(anywhere)


def _together(found: Mapping[int | None, int], count: int, siblings: Siblings) -> Iterator[int]:
    """Yield so many devices, whole groups of siblings first, each node's in turn.

    What is left of groups that are in use goes to odd amounts, before another group is broken:
    of the one with least left that still can, if there is one.
    """
    whole = {node: [mask for mask in siblings if not mask & ~bits] for node, bits in found.items()}
    odd = dict(found)
    kept: list[int] = []
    nodes = sorted(whole, key=lambda node: (node is None, node or 0))
    for node, mask in _alternating([((node, mask) for mask in whole[node]) for node in nodes]):
        odd[node] &= ~mask
        if mask.bit_count() <= count:
            count -= mask.bit_count()
            yield from _positions(mask)
        else:
            kept.append(mask)
    snug = _snuggest((bits & mask for bits in odd.values() for mask in siblings), count)
    yield from _positions(snug)
    yield from _in_turn({node: bits & ~snug for node, bits in odd.items()})
    for mask in kept:
        yield from _positions(mask)


def _snuggest(groups: Iterable[int], count: int) -> int:
    """Return the group with fewest devices that has so many; none (0) if none has."""
    enough = [bits for bits in groups if count and bits.bit_count() >= count]
    return min(enough, key=int.bit_count, default=0)


def _alternating(queues: Sequence[Iterator[_T]]) -> Iterator[_T]:
    """Yield one of each queue in turn."""
    while queues:
        still = []
        for queue in queues:
            first = next(queue, None)
            if first is not None:
                yield first
                still.append(queue)
        queues = still


def _positions(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
