from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.core.allocation import distribute
from agentd.core.allocation.distribute import Portion, alike

ROOMS = st.lists(st.integers(0, 9), min_size=1, max_size=5)


def dealt(rooms: list[int], parts: list[Portion]) -> list[int]:
    """Give the parts to single rooms, the first of each size first."""
    result = [0] * len(rooms)
    for part in parts:
        fitting = [i for i, room in enumerate(rooms) if room == part.room and not result[i]]
        assert 0 < part.devices <= len(fitting)
        for i in fitting[: part.devices]:
            result[i] = part.amount
    return result


def fill(rooms: list[int], amount: int) -> list[int]:
    return dealt(rooms, distribute.fill(alike(rooms), amount))


def evenly_whole(rooms: list[int], amount: int) -> list[int]:
    return dealt(rooms, distribute.evenly_whole(alike(rooms), amount))


def evenly_shares(rooms: list[int], amount: int) -> list[int]:
    return dealt(rooms, distribute.evenly_shares(alike(rooms), amount))


def in_equal_parts(rooms: list[int], capacities: list[int], amount: int) -> list[int] | None:
    parts = distribute.in_equal_parts(alike(rooms), alike(capacities), amount)
    return None if parts is None else dealt(rooms, parts)


def shares(*amounts: float) -> list[int]:
    return [round(amount * 100) for amount in amounts]


@pytest.mark.parametrize(
    ("rule", "rooms", "amount", "parts"),
    [
        (evenly_whole, [100, 100], 130, [65, 65]),
        (fill, [100, 100], 130, [100, 30]),
        (evenly_whole, [10, 10, 10], 7, [3, 2, 2]),
        (evenly_whole, [7, 8, 8], 23, [7, 8, 8]),
        (fill, [10, 10, 10], 7, [7, 0, 0]),
        (fill, [3, 10, 10], 23, [3, 10, 10]),
        (evenly_shares, shares(1, 1), 150, shares(0.75, 0.75)),
        (fill, shares(1, 1), 150, shares(1, 0.5)),
        (evenly_shares, shares(0.3, 0.3, 0.9), 100, shares(0.3, 0.3, 0.4)),
        (fill, shares(0.3, 0.3, 0.9), 100, shares(0.1, 0, 0.9)),
        (evenly_shares, shares(2, 3, 3, 5), 600, shares(0, 3, 3, 0)),
        (fill, shares(2, 3, 3, 5), 600, shares(0, 1, 0, 5)),
        (evenly_shares, [100] * 8, 600, [100] * 6 + [0, 0]),
        (fill, [100] * 8, 600, [100] * 6 + [0, 0]),
        (evenly_shares, [50, 20, 30], 20, [0, 20, 0]),
        # no number of rooms holds equal parts: a full one leaves its part to the others
        (evenly_shares, [20, 50, 50], 110, [20, 45, 45]),
    ],
)
def test_the_table_of_the_design(rule, rooms, amount, parts) -> None:
    assert rule(rooms, amount) == parts


@given(ROOMS, st.data())
def test_parts_fit_their_rooms_and_add_up(rooms: list[int], data: st.DataObject) -> None:
    amount = data.draw(st.integers(0, sum(rooms)))
    for rule in (fill, evenly_whole, evenly_shares):
        if amount or rule is not evenly_shares:
            parts = rule(rooms, amount)
            assert sum(parts) == amount
            assert all(0 <= part <= room for part, room in zip(parts, rooms, strict=True))


@given(ROOMS, st.data())
def test_evenly_for_shares_gives_equal_parts_or_all_share(rooms, data) -> None:
    """Compare with every subset of the rooms: the fewest, then the least room in total."""
    amount = data.draw(st.integers(0, sum(rooms)).filter(bool)) if sum(rooms) else None
    if amount is None:
        return
    got = evenly_shares(rooms, amount)
    chosen = [room for room, part in zip(rooms, got, strict=True) if part]
    subsets = (s for n in range(1, len(rooms) + 1) for s in combinations(rooms, n))
    equal = [(len(s), sum(s)) for s in subsets if _holds_equal_parts(s, amount)]
    if equal:
        parts = [part for part in got if part]
        assert max(parts) - min(parts) <= 1
        assert (len(chosen), sum(chosen)) == min(equal)
    else:
        assert got == evenly_whole(rooms, amount)


def _holds_equal_parts(rooms: tuple[int, ...], amount: int) -> bool:
    part, larger = divmod(amount, len(rooms))
    parts = [part] * (len(rooms) - larger) + [part + 1] * larger
    return part > 0 and all(p <= room for p, room in zip(parts, sorted(rooms), strict=True))


@given(ROOMS, st.data())
def test_larger_parts_go_to_the_freest(rooms, data) -> None:
    amount = data.draw(st.integers(0, sum(rooms)).filter(bool)) if sum(rooms) else None
    if amount is None:
        return
    got = evenly_shares(rooms, amount)
    for (room_a, part_a), (room_b, part_b) in combinations(zip(rooms, got, strict=True), 2):
        if part_a and part_b and room_a > room_b:
            assert part_a >= part_b


@pytest.mark.parametrize(
    ("rooms", "capacities", "amount", "parts"),
    [
        ([100, 100], [100, 100], 150, [75, 75]),
        ([100, 60], [100, 100], 150, None),
        ([40, 90, 100], [100, 100, 100], 150, [0, 75, 75]),
        ([30, 100], [100, 100], 100, [0, 100]),
        ([60, 60], [100, 100], 100, None),
        ([10], [10], 11, None),
    ],
)
def test_equal_parts_on_the_fewest_devices_or_none(rooms, capacities, amount, parts) -> None:
    assert in_equal_parts(rooms, capacities, amount) == parts
