from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.core.allocation.distribute import (
    equal_parts,
    evenly,
    evenly_in_shares,
    fewest_devices,
    fewest_devices_together,
    fill,
)
from agentd.core.slots import ONE
from core.machines import cores, gpus
from core.placing import CENT, EVENLY, FILL, given_ids, place, slots

ROOMS = st.lists(st.integers(0, 9), min_size=1, max_size=5).map(sorted)


def given_parts(capacities, asked, policy, kind="device") -> list[float]:
    """Ask for so much of devices that are empty, and return what each gives."""
    devices = gpus(*capacities, slot=f"cuda.{kind}")
    quantum = CENT if kind == "shares" else ONE
    request = slots(**{f"cuda_{kind}": asked})
    parts = given_ids(place([*cores(1), *devices], request, policy, quantum), "cuda")
    return [parts.get(device.device_id.id, 0) for device in devices]


@pytest.mark.parametrize(
    ("kind", "free", "asked", "by_evenly", "by_fill"),
    [
        ("device", [100, 100], 130, [65, 65], [100, 30]),
        ("device", [10, 10, 10], 7, [3, 2, 2], [7, 0, 0]),
        ("device", [7, 8, 8], 23, [7, 8, 8], [7, 8, 8]),
        ("device", [3, 10, 10], 23, [3, 10, 10], [3, 10, 10]),
        ("shares", [1, 1], 1.5, [0.75, 0.75], [1, 0.5]),
        ("shares", [0.3, 0.3, 0.9], 1, [0.3, 0.3, 0.4], [0.1, 0, 0.9]),
        ("shares", [2, 3, 3, 5], 6, [0, 3, 3, 0], [0, 1, 0, 5]),
        ("shares", [1] * 8, 6, [1] * 6 + [0, 0], [1] * 6 + [0, 0]),
        ("shares", [0.5, 0.2, 0.3], 0.2, [0, 0.2, 0], [0.2, 0, 0]),
        # no number of devices has room for equal parts: a full one leaves its part to the others
        ("shares", [0.2, 0.5, 0.5], 1.1, [0.2, 0.45, 0.45], [0.1, 0.5, 0.5]),
    ],
)
def test_the_table_of_the_design(kind, free, asked, by_evenly, by_fill) -> None:
    assert given_parts(free, asked, EVENLY, kind) == by_evenly
    assert given_parts(free, asked, FILL, kind) == by_fill


@given(ROOMS, st.data())
def test_parts_fit_their_rooms_and_add_up(rooms: list[int], data: st.DataObject) -> None:
    amount = data.draw(st.integers(0, sum(rooms)))
    for rule in (fill, evenly, evenly_in_shares):
        if amount or rule is not evenly_in_shares:
            parts = rule(rooms, amount)
            assert sum(parts) == amount
            assert all(0 <= part <= room for part, room in zip(parts, rooms, strict=True))


@given(ROOMS, st.data())
def test_evenly_for_shares_gives_equal_parts_or_all_share(rooms, data) -> None:
    """Compare with every subset of the rooms: the fewest, then the least room in total."""
    amount = data.draw(st.integers(0, sum(rooms)).filter(bool)) if sum(rooms) else None
    if amount is None:
        return
    got = evenly_in_shares(rooms, amount)
    chosen = [room for room, part in zip(rooms, got, strict=True) if part]
    subsets = (s for n in range(1, len(rooms) + 1) for s in combinations(rooms, n))
    equal = [(len(s), sum(s)) for s in subsets if _holds_equal_parts(s, amount)]
    if equal:
        parts = [part for part in got if part]
        assert max(parts) - min(parts) <= 1
        assert (len(chosen), sum(chosen)) == min(equal)
    else:
        assert got == evenly(rooms, amount)


def _holds_equal_parts(rooms: tuple[int, ...], amount: int) -> bool:
    part, larger = divmod(amount, len(rooms))
    parts = [part] * (len(rooms) - larger) + [part + 1] * larger
    return part > 0 and all(p <= room for p, room in zip(parts, sorted(rooms), strict=True))


@given(ROOMS, st.data())
def test_larger_parts_go_to_the_freest(rooms, data) -> None:
    amount = data.draw(st.integers(0, sum(rooms)).filter(bool)) if sum(rooms) else None
    if amount is None:
        return
    got = evenly_in_shares(rooms, amount)
    for (room_a, part_a), (room_b, part_b) in combinations(zip(rooms, got, strict=True), 2):
        if part_a and part_b and room_a > room_b:
            assert part_a >= part_b


@pytest.mark.parametrize(
    ("rooms", "capacities", "amount", "parts"),
    [
        ([100, 100], [100, 100], 150, [75, 75]),
        ([60, 100], [100, 100], 150, []),
        ([40, 90, 100], [100, 100, 100], 150, [0, 75, 75]),
        ([30, 100], [100, 100], 100, [0, 100]),
        ([60, 60], [100, 100], 100, []),
        ([7, 8, 9], [7, 8, 9], 15, [7, 8, 0]),
        ([8, 8, 8], [8, 8, 8], 15, [7, 8, 0]),
    ],
)
def test_equal_parts_on_the_fewest_devices_or_none(rooms, capacities, amount, parts) -> None:
    assert equal_parts(rooms, amount, fewest_devices(capacities, amount)) == parts


def test_no_number_of_devices_holds_too_much() -> None:
    assert fewest_devices([10], 11) == 0
    assert fewest_devices([], 1) == 0


SEVERAL = st.dictionaries(
    st.integers(0, 5), st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1
)


@given(SEVERAL, st.integers(1, 30), st.integers(1, 30))
def test_fewest_devices_hold_several_amounts_together(devices, one, other) -> None:
    capacities = {
        slot: {device: of[n] for device, of in devices.items() if of[n]}
        for n, slot in enumerate("ab")
    }
    amounts = {"a": one, "b": other}

    def holds(count: int) -> bool:
        parts = [-(-amount // count) for amount in (one, other)]
        enough = [of for of in devices.values() if of[0] >= parts[0] and of[1] >= parts[1]]
        return len(enough) >= count and count <= min(one, other)

    counts = [count for count in range(1, len(devices) + 1) if holds(count)]
    assert fewest_devices_together(capacities, amounts) == min(counts, default=0)
