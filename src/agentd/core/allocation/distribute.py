"""Dividing one amount over rooms: the arithmetic beneath an allocation.

Everything here counts in quanta. `Rooms` are what devices could still give, smallest
first, alike ones together: `[(30, 2), (90, 1)]` is two rooms of 30 and one of 90. The
answer is in the same terms (`Portion(90, 40, 1)`: one device with a room of 90 gives 40), so
the cost grows with the sizes of room and not with the devices. Which of several devices
alike is meant is the caller's business; the first part of a size goes to its first device.
Callers have checked that the rooms can hold the amount; `in_equal_parts` says None where
they cannot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import accumulate
from operator import and_
from typing import NamedTuple, TypeAlias

Rooms: TypeAlias = Sequence[tuple[int, int]]
"""(room, how many devices have it), smallest room first, none of them zero."""


class Portion(NamedTuple):
    """The quanta that each of so many `devices` with this `room` gives."""

    room: int
    amount: int
    devices: int


def alike(rooms: Iterable[int]) -> list[tuple[int, int]]:
    """Return single rooms as `Rooms`; those without room are left out."""
    return sorted(Counter(room for room in rooms if room).items())


def fill(rooms: Rooms, amount: int) -> list[Portion]:
    """Take all that is free in the freest room, then the next."""
    parts: list[Portion] = []
    for room, count in reversed(rooms):
        full = min(count, amount // room)
        amount -= full * room
        if full:
            parts.append(Portion(room, room, full))
        if amount and full < count:
            parts.append(Portion(room, amount, 1))
            amount = 0
        if not amount:
            break
    return parts


def evenly_whole(rooms: Rooms, amount: int) -> list[Portion]:
    """Share equally among all rooms, the remainder to the freest ones."""
    parts: list[Portion] = []
    wide = sum([count for _, count in rooms])
    for position, (room, count) in enumerate(rooms):
        if room > amount // wide:
            return parts + _alike_parts(rooms[position:], *divmod(amount, wide))
        parts.append(Portion(room, room, count))
        amount -= room * count
        wide -= count
    return parts


def _alike_parts(rooms: Rooms, part: int, one_more: int) -> list[Portion]:
    """Give every room `part`, and the `one_more` freest of them one quantum more."""
    parts: list[Portion] = []
    for room, count in reversed(rooms):
        larger = min(count, one_more)
        one_more -= larger
        if larger:
            parts.append(Portion(room, part + 1, larger))
        if part and larger < count:
            parts.append(Portion(room, part, count - larger))
        if not (part or one_more):
            break
    return parts


def evenly_shares(rooms: Rooms, amount: int) -> list[Portion]:
    """Give equal parts on the fewest rooms that have space for them; else all rooms share.

    One room that holds the amount gives it alone.
    """
    counts = range(1, sum([count for _, count in rooms]) + 1)
    return evenly_whole(_equal_rooms(rooms, amount, counts) or rooms, amount)


def in_equal_parts(rooms: Rooms, capacities: Rooms, amount: int) -> list[Portion] | None:
    """Give equal parts on the fewest devices that could hold it so if all were empty.

    None if there are not so many with room enough now.
    """
    count = fewest(capacities, amount)
    chosen = _equal_rooms(rooms, amount, [count] if count else [])
    return evenly_whole(chosen, amount) if chosen else None


def fewest(capacities: Rooms, amount: int) -> int:
    """Return how few devices could hold the amount in equal parts; 0 if all cannot."""
    devices = sum([count for _, count in capacities])
    on_empty = _equal_rooms(capacities, amount, range(1, devices + 1))
    return sum([count for _, count in on_empty])


def fewest_together(sizes: Sequence[Sequence[tuple[int, int]]], amounts: Sequence[int]) -> int:
    """Return how few empty devices could hold several amounts in equal parts; 0 if all cannot.

    `sizes` are for each amount the devices (as bits) by how much they can hold, smallest first. A
    device counts if it can hold the larger part of each.
    """
    if not all(sizes):
        return 0
    devices = sum(found.bit_count() for _, found in sizes[0])
    unseen = [list(by_size) for by_size in sizes]
    fitting = [0] * len(sizes)
    least = max(-(-amount // of[-1][0]) for amount, of in zip(amounts, sizes, strict=True))
    for count in range(least, min(devices, *amounts) + 1):
        for place, amount in enumerate(amounts):
            larger = -(-amount // count)
            while unseen[place] and unseen[place][-1][0] >= larger:
                fitting[place] |= unseen[place].pop()[1]
        if reduce(and_, fitting).bit_count() >= count:
            return count
    return 0


def _equal_rooms(rooms: Rooms, amount: int, counts: Iterable[int]) -> list[tuple[int, int]]:
    """Return the tightest rooms for parts one quantum apart at most, on the first count
    that has enough of them; empty if none has.
    """
    from_here = [*accumulate([count for _, count in reversed(rooms)], initial=0)][::-1]
    for count in counts:
        part, larger = divmod(amount, count)
        if not part:
            break
        start = bisect_left(rooms, (part, 0))
        exact = 0
        if start < len(rooms) and rooms[start][0] == part:
            exact = min(rooms[start][1], count - larger)
            start += 1
        if exact + from_here[start] >= count:
            return [(part, exact)] * (exact > 0) + first_rooms(rooms[start:], count - exact)
    return []


def first_rooms(rooms: Rooms, count: int) -> list[tuple[int, int]]:
    """Return the first `count` of the rooms."""
    chosen = []
    for room, there in rooms:
        if not count:
            break
        chosen.append((room, min(there, count)))
        count -= chosen[-1][1]
    return chosen
