from dataclasses import replace

import pytest

from agentd.core.invariants import Booked, Census, There, changes, violations
from agentd.core.kernel import KernelState

RUNNING, ENDED = KernelState.RUNNING, KernelState.TERMINATED
GOOD = Census(
    is_shared=False,
    capacities={"cuda/cuda0": 100, "cuda/cuda1": 100, "mem/root": 1000},
    holdings={"cuda/cuda0": {"k1": 60, "k2": 40}, "mem/root": {"k1": 500, "k3": 500}},
    booked={
        "k1": Booked("a", RUNNING, "1"),
        "k2": Booked("a", RUNNING, "2"),
        "k3": Booked("b", RUNNING, "3"),
        "k4": Booked("b", ENDED, "4"),
    },
    there={
        "k1": There("1", is_alive=True, given={"cuda/cuda0": 60, "mem/root": 500}),
        "k2": There("2", is_alive=True, given={"cuda/cuda0": 40}),
        "k3": There("3", is_alive=True, given={"mem/root": 500}),
        "k4": There("4", is_alive=False),
    },
    divisible=frozenset({"mem/root"}),
)


def holding(**by_kernel: int) -> dict:
    return {"cuda/cuda0": {"k1": 60, "k2": 40} | by_kernel, "mem/root": {"k1": 500, "k3": 500}}


def booked(**kernels: Booked) -> dict:
    return {**GOOD.booked, **kernels}


def there(**kernels: There | None) -> dict:
    return {name: item for name, item in {**GOOD.there, **kernels}.items() if item is not None}


CASES = {
    "more than there is": (
        replace(GOOD, is_shared=True, holdings=holding(k3=1)),
        "capacity",
        "cuda/cuda0: 101 of 100 is held, by k1, k2, k3",
    ),
    "two agents on one device": (
        replace(GOOD, capacities=GOOD.capacities | {"cuda/cuda0": 200}, holdings=holding(k3=1)),
        "owner",
        "cuda/cuda0 is held by k1, k2, k3, of agents a, b",
    ),
    "alive and booked as ended": (
        replace(GOOD, there=there(k4=There("4", is_alive=True))),
        "accounted",
        "kernel k4 (4) lives, and is booked as terminated",
    ),
    "alive and in no book": (
        replace(GOOD, there=there(k5=There("5", is_alive=True))),
        "stray",
        "kernel k5 (5) is in no book",
    ),
    "ended and in no book": (
        replace(GOOD, there=there(k5=There("5", is_alive=False))),
        "stray",
        "kernel k5 (5) is in no book",
    ),
    "another process than the one booked": (
        replace(GOOD, booked=booked(k2=Booked("a", RUNNING, "9"))),
        "accounted",
        "kernel k2 is 2, and is booked as 9",
    ),
    "holds less than it was given": (
        replace(GOOD, holdings=holding(k2=30)),
        "accounted",
        "kernel k2 was given 40 of cuda/cuda0, the ledger has 30",
    ),
    "holds nothing of what it was given": (
        replace(GOOD, there=there(k3=There("3", is_alive=True, given={"cuda/cuda1": 1}))),
        "accounted",
        "kernel k3 was given 1 of cuda/cuda1, the ledger has 0",
    ),
    "a holder that has ended": (
        replace(GOOD, holdings=GOOD.holdings | {"cuda/cuda1": {"k4": 1}}),
        "ghost",
        "kernel k4 holds devices and is terminated",
    ),
    "a holder that nobody knows": (
        replace(GOOD, holdings=GOOD.holdings | {"cuda/cuda1": {"k9": 1}}),
        "ghost",
        "kernel k9 holds devices and is unknown",
    ),
    "booked as alive and gone": (
        replace(GOOD, there=there(k2=None)),
        "ghost",
        "kernel k2 is booked as running, and is not",
    ),
    "booked as alive and ended": (
        replace(GOOD, there=there(k2=There("2", is_alive=False))),
        "ghost",
        "kernel k2 is booked as running, and is not",
    ),
    "something left": (replace(GOOD, strays=("cgroup x",)), "stray", "cgroup x"),
}


def test_a_node_in_order_has_no_violation() -> None:
    assert violations(GOOD) == []
    starting = booked(k5=Booked("a", KernelState.CREATING, None))
    assert violations(replace(GOOD, booked=starting)) == []
    held_whole = {**GOOD.holdings, "cuda/cuda1": {"k1": 0, "k3": 0}}
    assert violations(replace(GOOD, holdings=held_whole)) == []
    assert violations(replace(GOOD, is_shared=True)) == []


@pytest.mark.parametrize("name", CASES)
def test_one_thing_out_of_order_is_one_violation(name: str) -> None:
    census, rule, detail = CASES[name]
    assert violations(census) == [(rule, detail)]


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (replace(GOOD, there=there(k1=None)), "kernel k1 was 1, is gone"),
        (replace(GOOD, there=there(k1=There("7", is_alive=True))), "kernel k1 was 1, is 7"),
        (
            replace(GOOD, booked=booked(k1=Booked("a", ENDED, "1"))),
            "kernel k1 lives and is not booked so",
        ),
        (
            replace(GOOD, there=there(k1=There("1", is_alive=True, given={}))),
            "kernel k1 holds {}",
        ),
    ],
)
def test_what_lived_has_to_live_on_as_it_was(after: Census, why: str) -> None:
    assert changes(GOOD, GOOD) == []
    assert changes(GOOD, after) == [("survival", why)]
    assert changes(GOOD, after, touched={"k1"}) == []


def test_what_had_ended_may_go() -> None:
    assert changes(GOOD, replace(GOOD, there=there(k4=None))) == []
