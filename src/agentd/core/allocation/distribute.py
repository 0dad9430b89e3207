"""Dividing one amount over rooms: the arithmetic beneath an allocation.

Everything here counts in quanta. `Rooms` are what devices could still give, smallest
first, alike ones together: `[(30, 2), (90, 1)]` is two rooms of 30 and one of 90. The
answer is in the same terms (`Portion(90, 40, 1)`: one device with a room of 90 gives 40), so
the cost grows with the sizes of room and not with the devices. Which of several devices
alike is meant is the caller's business; the first part of a size goes to its first device.
Callers have checked that the rooms can hold the amount; `in_equal_parts` says None where
they cannot.

The most equal parts (shares, strategy evenly) need no search over subsets. Write top(k)
for the k freest rooms and let every part be the smaller of its room and a level:

1.  For a given number of rooms k, top(k) has the smallest spread: another subset has
    neither a larger smallest room nor a lower level.
2.  If some spread is one quantum or none, the parts are a or a + 1 where
    a = amount // k; any k rooms of at least a, enough of them of at least a + 1, will do,
    and the smallest such have the least room.
3.  Otherwise every subset that reaches the best spread has the smallest room m of top(k),
    and the level m + spread. (With a smaller m the level would be lower too, and even
    top(k) does not hold the amount at a lower level.) So it differs from top(k) only
    in rooms of exactly m that stand in for larger ones, as far as the slack allows.
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
    """Give the tightest single room that holds it all, else the most equal parts.

    Most equal is the smallest difference between the largest and the smallest part, one
    quantum or less counting as equal; then the fewest rooms; then the least room in total.
    """
    tightest = bisect_left(rooms, (amount, 0))
    if tightest < len(rooms):
        return [Portion(rooms[tightest][0], amount, 1)]
    counts = range(2, sum([count for _, count in rooms]) + 1)
    chosen = _equal_rooms(rooms, amount, counts) or _most_equal(rooms, amount)
    return evenly_whole(chosen, amount)


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


def _most_equal(rooms: Rooms, amount: int) -> list[tuple[int, int]]:
    """Return the rooms of the most equal parts, no equal ones being possible.

    So the level is above the smallest room that is used, for any smallest room.
    """
    descending = rooms[::-1]
    counts = [*accumulate([count for _, count in descending], initial=0)]
    sums = [*accumulate([room * count for room, count in descending], initial=0)]

    def level(last: int) -> tuple[int, int]:
        """Return the lowest level if sizes 0 to `last` are used, and what larger ones give."""

        def is_too_low(size: int) -> bool:
            return descending[size][0] * counts[size] + sums[last + 1] - sums[size] < amount

        cut = bisect_left(range(last + 1), x=True, key=is_too_low)
        lowest = -(-(amount - sums[last + 1] + sums[cut]) // counts[cut])
        return lowest, lowest * counts[cut] + sums[last] - sums[cut]

    spread, needed, last = min(
        (lowest - smallest, counts[last] + max(1, -(-(amount - larger) // smallest)), last)
        for last, (smallest, _) in enumerate(descending)
        if sums[last + 1] >= amount
        for lowest, larger in [level(last)]
    )
    smallest, there = descending[last]
    used = needed - counts[last]
    slack = level(last)[1] + used * smallest - amount
    dropped = _replaceable(descending[:last], smallest, spread, slack, there - used)
    kept = Counter(dict(descending[:last])) - dropped
    return [(smallest, used + dropped.total()), *sorted(kept.items())]


def _replaceable(larger: Rooms, smallest: int, spread: int, slack: int, spare: int) -> Counter[int]:
    """Return the larger rooms that spare ones of the smallest size can stand in for.

    Frees the most room that the slack pays for. A room above the level costs the whole
    spread, so the freest of those go first; one below costs what it frees, which leaves a
    sum to be reached with as few rooms as possible. Slack is less than the number of rooms
    above the level, or the level would be lower; that bounds the sums.
    """
    level = smallest + spread
    above = [room for room, count in larger if room >= level for _ in range(count)]
    fewest: dict[int, tuple[int, ...]] = {0: ()}
    for room, count in larger:
        cost = room - smallest
        for _ in range(min(count, slack // cost, spare) if room < level else 0):
            for total, rooms in sorted(fewest.items(), reverse=True):
                reached = total + cost
                known = fewest.get(reached)
                if reached <= slack and (known is None or len(rooms) + 1 < len(known)):
                    fewest[reached] = (*rooms, room)
    best = max(
        (
            (*above[:taken], *rooms)
            for taken in range(min(len(above), spare, slack // spread) + 1)
            for total, rooms in fewest.items()
            if total <= slack - taken * spread and len(rooms) <= spare - taken
        ),
        key=lambda rooms: sum(rooms) - smallest * len(rooms),
    )
    return Counter(best)
