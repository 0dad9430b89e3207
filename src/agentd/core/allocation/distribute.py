"""Dividing one amount over rooms: the arithmetic beneath an allocation.

Everything here counts in quanta. `rooms` are what devices could still give, tightest first, and a
rule returns what each of them gives. Rules can rely on rooms that hold the amount together.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

_Device = TypeVar("_Device", bound=Hashable)


def fill(rooms: Sequence[int], amount: int) -> list[int]:
    """Take all that is free in the freest room, then the next."""
    parts = []
    for room in reversed(rooms):
        parts.append(min(room, amount))
        amount -= parts[-1]
    return parts[::-1]


def evenly(rooms: Sequence[int], amount: int) -> list[int]:
    """Share among all rooms; a full one leaves its part to the others, the freest give most."""
    parts = []
    for number, room in enumerate(rooms):
        parts.append(min(room, amount // (len(rooms) - number)))
        amount -= parts[-1]
    return parts


def evenly_in_shares(rooms: Sequence[int], amount: int) -> list[int]:
    """Give equal parts on the fewest rooms that have space for them; else all rooms share.

    One room that holds the amount gives it alone.
    """
    counts = range(1, len(rooms) + 1)
    equal = (equal_parts(rooms, amount, count) for count in counts)
    return next(filter(None, equal), None) or evenly(rooms, amount)


def equal_parts(rooms: Sequence[int], amount: int, count: int) -> list[int]:
    """Give parts one quantum apart at most on `count` rooms, the tightest that have space.

    Empty if there are not so many, or no quantum for each.
    """
    part, larger = divmod(amount, count)
    first, freer = bisect_left(rooms, part), bisect_right(rooms, part)
    start = max(first, freer - (count - larger))
    if not part or start + count > len(rooms):
        return []
    after = len(rooms) - start - count
    return [0] * start + [part] * (count - larger) + [part + 1] * larger + [0] * after


def fewest_devices(capacities: Sequence[int], amount: int) -> int:
    """Return how few devices could hold the amount in equal parts; 0 if all cannot.

    `capacities` are what the devices could give if they were empty, smallest first.
    """
    counts = range(1, len(capacities) + 1)
    return next((count for count in counts if equal_parts(capacities, amount, count)), 0)


def fewest_devices_together(
    capacities: Mapping[str, Mapping[_Device, int]], amounts: Mapping[str, int]
) -> int:
    """Return how few empty devices could hold amounts of several slots in equal parts; 0 if none.

    `capacities` are by slot what the devices could hold of it, none of them zero. A device counts
    if it can hold the larger part of each.
    """
    first, *others = (capacities[slot] for slot in amounts)
    minimum_counts = sorted(
        max(-(-amount // capacities[slot][device]) for slot, amount in amounts.items())
        for device in first
        if all(device in other for other in others)
    )
    for count, minimum in enumerate(minimum_counts, 1):
        if minimum <= count <= min(amounts.values()):
            return count
    return 0
