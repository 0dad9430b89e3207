"""The free index: the devices that may give one slot to one agent, by what is free on them (room).

Devices alike (the same room, the same NUMA node) are one set of bits: bit i is the device
at position i of the natural order. The first of them is the lowest bit, how many there are
is a count of bits, and a device that is given or comes back moves from one set to another.
So neither choosing nor keeping up costs more for devices that a request does not touch.

Immutable: `with_rooms` returns the index after a change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from agentd.core.devices import Device, DeviceId
from agentd.core.distribute import Part, Rooms, alike

Buckets: TypeAlias = dict[int | None, dict[int, int]]
"""By NUMA node and by room in quanta: the positions of the devices, as bits."""


@dataclass(frozen=True, slots=True, eq=False)
class FreeIndex:
    """Devices in natural order, and the room on each in quanta.

    `limits` is the most that the agent may hold of each, `capacities` the same by size.
    """

    devices: tuple[Device, ...]
    positions: Mapping[DeviceId, int]
    limits: tuple[int, ...]
    capacities: Rooms
    quantum: int
    buckets: Buckets

    def only(self, device_ids: Collection[DeviceId]) -> FreeIndex:
        """Return the index of some of the devices."""
        there = [self.positions[d] for d in device_ids if d in self.positions]
        bits = sum(1 << position for position in there)
        buckets = {
            node: {room: some for room, found in by_room.items() if (some := found & bits)}
            for node, by_room in self.buckets.items()
        }
        return replace(
            self,
            capacities=alike(self.limits[position] for position in there),
            buckets={node: found for node, found in buckets.items() if found},
        )

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


def given(buckets: Buckets, parts: Iterable[Part]) -> Iterator[tuple[int, int]]:
    """Yield (position, quanta) for each device that gives a part."""
    queues: dict[int, Iterator[int]] = {}
    for part in parts:
        queue = queues.get(part.room)
        if queue is None:
            queue = queues[part.room] = _in_turn(buckets, part.room)
        for _ in range(part.devices):
            yield next(queue), part.amount


def _in_turn(buckets: Buckets, room: int) -> Iterator[int]:
    """Yield the devices with this room: one of each NUMA node in turn, in natural order.

    Devices that are near everything come after those that have a node.
    """
    found = {node: bits for node, by_room in buckets.items() if (bits := by_room.get(room))}
    anywhere = found.pop(None, 0)
    queues = [_positions(bits) for _, bits in sorted(found.items(), key=lambda item: item[0] or 0)]
    while queues:
        still = []
        for queue in queues:
            position = next(queue, None)
            if position is not None:
                yield position
                still.append(queue)
        queues = still
    yield from _positions(anywhere)


def _positions(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
