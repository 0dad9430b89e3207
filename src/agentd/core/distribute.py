"""Dividing one amount over rooms: the arithmetic beneath an allocation.

Everything here counts in quanta: `rooms[i]` is what device i could still give,
`amount` what is wanted, and the answer has one part for each room. Rooms come in
the order of preference, which decides wherever a rule leaves a choice. Callers have
checked that the rooms can hold the amount; `in_equal_parts` says None where they cannot.

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

from collections.abc import Sequence
from itertools import accumulate


def fill(rooms: Sequence[int], amount: int) -> list[int]:
    """Take all that is free in the freest room, then the next."""
    parts = [0] * len(rooms)
    for index in _freest_first(rooms):
        parts[index] = min(rooms[index], amount)
        amount -= parts[index]
        if not amount:
            break
    return parts


def evenly_whole(rooms: Sequence[int], amount: int) -> list[int]:
    """Share equally among the rooms that have any, the remainder to the freest ones."""
    parts = [0] * len(rooms)
    open_rooms = [index for index in _freest_first(rooms) if rooms[index]]
    while amount:
        share = amount // len(open_rooms)
        full = [index for index in open_rooms if rooms[index] - parts[index] <= share]
        if not full:
            for position, index in enumerate(open_rooms):
                extra = share + (position < amount % len(open_rooms))
                parts[index] += extra
            return parts
        for index in full:
            amount -= rooms[index] - parts[index]
            parts[index] = rooms[index]
        open_rooms = [index for index in open_rooms if parts[index] < rooms[index]]
    return parts


def evenly_shares(rooms: Sequence[int], amount: int) -> list[int]:
    """Give the tightest single room that holds it all, else the most equal parts.

    Most equal is the smallest difference between the largest and the smallest part, one
    quantum or less counting as equal; then the fewest rooms; then the least room in total.
    """
    holding = [index for index, room in enumerate(rooms) if room >= amount]
    if holding:
        chosen = [min(holding, key=rooms.__getitem__)]
    else:
        chosen = _equal_rooms(rooms, amount, range(2, len(rooms) + 1)) or _most_equal(rooms, amount)
    return _level(rooms, chosen, amount)


def in_equal_parts(
    rooms: Sequence[int], capacities: Sequence[int], amount: int
) -> list[int] | None:
    """Give equal parts on the fewest devices that could hold it so if all were empty.

    None if there are not so many with room enough now.
    """
    fewest = next(
        (k for k in range(1, len(capacities) + 1) if _equal_rooms(capacities, amount, [k])), None
    )
    if fewest is None:
        return None
    chosen = _equal_rooms(rooms, amount, [fewest])
    return _level(rooms, chosen, amount) if chosen else None


def _freest_first(rooms: Sequence[int]) -> list[int]:
    return sorted(range(len(rooms)), key=lambda index: -rooms[index])


def _equal_rooms(rooms: Sequence[int], amount: int, counts: Sequence[int]) -> list[int]:
    """Return the tightest rooms for parts one quantum apart at most, on the first count
    that has enough of them; empty if none has.
    """
    ascending = sorted(range(len(rooms)), key=rooms.__getitem__)
    for count in counts:
        part, larger = divmod(amount, count)
        if not part:
            break
        exact = [index for index in ascending if rooms[index] == part][: count - larger]
        above = [index for index in ascending if rooms[index] > part]
        if len(exact) + len(above) >= count:
            return exact + above[: count - len(exact)]
    return []


def _most_equal(rooms: Sequence[int], amount: int) -> list[int]:
    """Return the rooms of the most equal parts, no equal ones being possible."""
    order = [index for index in _freest_first(rooms) if rooms[index]]
    descending = [rooms[index] for index in order]
    sums = list(accumulate(descending))
    spread, count, level = min(
        (_lowest_level(descending[:k], amount) - descending[k - 1], k, 0)
        for k in range(1, len(order) + 1)
        if sums[k - 1] >= amount
    )
    smallest = descending[count - 1]
    level = smallest + spread
    slack = sum(min(room, level) for room in descending[:count]) - amount
    larger = [index for index in order[:count] if rooms[index] > smallest]
    exact = [index for index in order if rooms[index] == smallest]
    spare = len(exact) - (count - len(larger))
    dropped = _replaceable(rooms, larger, smallest, level, slack, spare)
    kept = [index for index in larger if index not in dropped]
    return kept + exact[: count - len(kept)]


def _lowest_level(descending: Sequence[int], amount: int) -> int:
    """Return the lowest level at which rooms cut off there hold the amount."""
    below, wide = amount, len(descending)
    for room in reversed(descending):
        level = -(-below // wide)
        if level <= room:
            return level
        below -= room
        wide -= 1
    return descending[0]


def _replaceable(
    rooms: Sequence[int],
    larger: Sequence[int],
    smallest: int,
    level: int,
    slack: int,
    spare: int,
) -> frozenset[int]:
    """Return the larger rooms that spare ones of the smallest size can stand in for.

    Frees the most room that the slack pays for; the first found of equal answers.
    """
    best: dict[tuple[int, int], tuple[int, frozenset[int]]] = {(0, 0): (0, frozenset())}
    for index in larger:
        cost = min(rooms[index], level) - smallest
        for (used, spent), (freed, dropped) in sorted(best.items(), reverse=True):
            state = (used + 1, spent + cost)
            gain = freed + rooms[index] - smallest
            if state[0] <= spare and state[1] <= slack and gain > best.get(state, (0,))[0]:
                best[state] = (gain, dropped | {index})
    return max(best.values(), key=lambda item: item[0])[1]


def _level(rooms: Sequence[int], chosen: Sequence[int], amount: int) -> list[int]:
    """Raise the chosen rooms to one level, the larger parts to the freest."""
    parts = [0] * len(rooms)
    wide = len(chosen)
    for index in sorted(chosen, key=lambda index: (rooms[index], -index)):
        parts[index] = min(rooms[index], amount // wide)
        amount -= parts[index]
        wide -= 1
    return parts
