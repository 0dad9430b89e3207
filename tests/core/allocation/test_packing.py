"""Where kernels go so that others still fit, and where a request says that they may."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.core.allocation.ledger import Ledger
from agentd.core.allocation.policy import AllocationPolicy
from agentd.errors import InsufficientResource
from core.machines import cores, gpus, threads
from core.placing import CENT, EVENLY, SNUG, given_ids, named, numa, place, slots


def test_small_kernels_leave_whole_nodes_to_larger_ones() -> None:
    """1, 1 and 4 GPUs on two nodes of 4: under `fill` the four are on one."""
    ledger = Ledger()
    for kernel_id, count in (("k1", 1), ("k2", 1), ("k3", 4)):
        devices = [*cores(2), *numa(0, 0, 0, 0, 1, 1, 1, 1)]
        got = place(devices, slots(cuda_device=count), SNUG, ledger=ledger)
        ledger = ledger.with_holding(kernel_id, "a", got)
    assert sorted(given_ids(got, "cuda")) == ["cuda4", "cuda5", "cuda6", "cuda7"]


@pytest.mark.parametrize(
    ("only", "asked", "expected"),
    [
        (named("cuda", "cuda1", "cuda3"), 1, {"cuda1": 1}),
        (named("cuda", "cuda1", "cuda3"), 2, {"cuda1": 1, "cuda3": 1}),
        (named("cuda", "cuda3"), 1, {"cuda3": 1}),
        (named("rocm", "rocm0"), 1, {"cuda0": 1}),
    ],
)
def test_a_request_may_name_the_devices_to_choose_from(only, asked, expected) -> None:
    devices = [*cores(2), *gpus(1, 1, 1, 1)]
    assert given_ids(place(devices, slots(cuda_device=asked), only=only), "cuda") == expected


def test_unnamed_devices_are_not_allocated_or_hinted() -> None:
    devices, only, whole = [*cores(2), *gpus(1, 1)], named("cuda", "cuda1"), AllocationPolicy()
    with pytest.raises(InsufficientResource) as refused:
        place(devices, slots(cuda_device=2), EVENLY, CENT, only=only)
    assert refused.value.free == "1"
    first, second = refused.value.explain
    assert first["reason"] == "not among the devices that the request or its claim names"
    assert (second["considered"], second["free"]) == (True, "1")
    with pytest.raises(InsufficientResource):
        place(devices, slots(cuda_device=1.5), whole, CENT, only=only)
    got = place(devices, slots(cuda_device=0.5), whole, CENT, only=only)
    assert given_ids(got, "cuda") == {"cuda1": 0.5}


SMT = threads(*((0, n % 4) for n in range(8)))
"""Four cores of two threads: 0 and 4, 1 and 5, 2 and 6, 3 and 7."""
TWO_NODES = threads(*((n % 4 // 2, n % 2) for n in range(8)))
"""Cores 0, 4 and 1, 5 on node 0; 2, 6 and 3, 7 on node 1."""

LONE = threads((0, 0), (0, 1), (0, 1), (0, 2), (0, 2))
"""Cores 1, 2 and 3, 4, after thread 0, whose sibling Linux does not list."""


@pytest.mark.parametrize(
    ("devices", "held", "asked", "expected"),
    [
        (SMT, (), 2, "04"),
        (SMT, (), 3, "014"),
        (SMT, (), 4, "0145"),
        # half a core is in use: left to odd amounts
        (SMT, (0,), 2, "15"),
        (SMT, (0,), 1, "4"),
        (SMT, (0,), 3, "145"),
        (SMT, (0, 1, 2, 3), 2, "45"),
        # whole cores alternate between nodes
        (TWO_NODES, (), 2, "04"),
        (TWO_NODES, (), 4, "0246"),
        (TWO_NODES, (), 3, "024"),
        (TWO_NODES, (0,), 3, "145"),
        # a core of one thread is for odd amounts
        (LONE, (), 2, "12"),
        (LONE, (), 3, "012"),
        (LONE, (), 4, "1234"),
        (LONE, (), 1, "0"),
        (LONE, (1,), 1, "2"),
        (LONE, (1,), 3, "234"),
        (LONE, (1,), 4, "0234"),
    ],
)
def test_both_threads_of_a_core_are_taken_before_the_next_core(
    devices, held, asked, expected
) -> None:
    ledger = held_cores(devices, held)
    got = place(devices, slots(cpu=asked), ledger=ledger)
    assert "".join(sorted(given_ids(got, "cpu"))) == expected


def held_cores(devices, held) -> Ledger:
    """A ledger in which a kernel holds these cores."""
    if not held:
        return Ledger()
    had = place(devices, slots(cpu=len(held)), only=named("cpu", *held))
    return Ledger().with_holding("h", "a", had)


def test_parts_of_one_parent_are_given_together() -> None:
    """Of three boards of four chips, with 1, 3 and 4 chips free, three come from the second."""
    devices = threads(*((0, n // 4) for n in range(12)))
    ledger = held_cores(devices, (0, 1, 2, 4))
    for asked, expected in ((3, "567"), (2, "56"), (1, "3")):
        got = given_ids(place(devices, slots(cpu=asked), ledger=ledger), "cpu")
        assert "".join(sorted(got)) == expected


@given(st.sets(st.integers(0, 11), max_size=11), st.integers(1, 12), st.sampled_from([2, 3, 4]))
def test_no_more_cores_are_broken_than_must_be(held: set[int], asked: int, width: int) -> None:
    """Use one node whose cores have several threads, some of them held."""
    devices = threads(*((0, n % (12 // width)) for n in range(12)))
    free = [n for n in range(12) if n not in held]
    if asked > len(free):
        return
    got = given_ids(place(devices, slots(cpu=asked), ledger=held_cores(devices, held)), "cpu")
    groups: dict[int, set[str]] = {}
    for n in range(12):
        groups.setdefault(n % (12 // width), set()).add(str(n))
    whole = [group for group in groups.values() if not group & {str(n) for n in held}]
    spare = len(free) - width * len(whole)
    broken = sum(1 for group in whole if 0 < len(group & got.keys()) < width)
    left = asked - width * min(len(whole), asked // width)
    assert len(got) == asked
    assert broken == (1 if left > spare else 0)
