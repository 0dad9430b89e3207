import pytest
from msgspec.structs import replace

from agentd.core.invariants import (
    NodeSnapshot,
    Present,
    RecordedClaim,
    RecordedKernel,
    Violation,
    violations,
)
from agentd.core.kernel.states import KernelState
from support.checked_node import lost_kernels

RUNNING, ENDED = KernelState.RUNNING, KernelState.TERMINATED
GOOD = NodeSnapshot(
    is_shared=False,
    capacities={"cuda/cuda0/cuda.device": 100, "cuda/cuda1/cuda.device": 100, "mem/root/mem": 1000},
    holdings={
        "cuda/cuda0/cuda.device": {"k1": 60, "k2": 40},
        "mem/root/mem": {"k1": 500, "k3": 500},
    },
    accounted={
        "k1": RecordedKernel("a", RUNNING, "1"),
        "k2": RecordedKernel("a", RUNNING, "2"),
        "k3": RecordedKernel("b", RUNNING, "3"),
        "k4": RecordedKernel("b", ENDED, "4"),
    },
    present={
        "k1": Present(
            "1", is_alive=True, given={"cuda/cuda0/cuda.device": 60, "mem/root/mem": 500}
        ),
        "k2": Present("2", is_alive=True, given={"cuda/cuda0/cuda.device": 40}),
        "k3": Present("3", is_alive=True, given={"mem/root/mem": 500}),
        "k4": Present("4", is_alive=False),
    },
    divisible=frozenset({"mem/root"}),
)


def holding(**by_kernel: int) -> dict:
    return {
        "cuda/cuda0/cuda.device": {"k1": 60, "k2": 40} | by_kernel,
        "mem/root/mem": {"k1": 500, "k3": 500},
    }


def accounted(**kernels: RecordedKernel) -> dict:
    return {**GOOD.accounted, **kernels}


def present(**kernels: Present | None) -> dict:
    return {name: item for name, item in {**GOOD.present, **kernels}.items() if item is not None}


CASES = {
    "more than there is": (
        replace(GOOD, is_shared=True, holdings=holding(k3=1)),
        "capacity",
        "cuda/cuda0/cuda.device: 101 of 100 are held, by k1, k2, k3",
    ),
    "two agents on one device": (
        replace(
            GOOD,
            capacities=GOOD.capacities | {"cuda/cuda0/cuda.device": 200},
            holdings=holding(k3=1),
        ),
        "owner",
        "cuda/cuda0 is held by k1, k2, k3, of agents a, b",
    ),
    "alive and booked as ended": (
        replace(GOOD, present=present(k4=Present("4", is_alive=True))),
        "accounted",
        "kernel k4 (4) lives but is terminated",
    ),
    "alive and in no book": (
        replace(GOOD, present=present(k5=Present("5", is_alive=True))),
        "stray",
        "kernel k5 (5) runs but is not recorded",
    ),
    "ended and in no book": (
        replace(GOOD, present=present(k5=Present("5", is_alive=False))),
        "stray",
        "kernel k5 (5) runs but is not recorded",
    ),
    "another process than the one booked": (
        replace(GOOD, accounted=accounted(k2=RecordedKernel("a", RUNNING, "9"))),
        "accounted",
        "kernel k2 is 2, recorded as 9",
    ),
    "holds less than it was given": (
        replace(GOOD, holdings=holding(k2=30)),
        "accounted",
        "kernel k2 has 40 of cuda/cuda0/cuda.device, the ledger 30",
    ),
    "holds nothing of what it was given": (
        replace(
            GOOD,
            present=present(k3=Present("3", is_alive=True, given={"cuda/cuda1/cuda.device": 1})),
        ),
        "accounted",
        "kernel k3 has 1 of cuda/cuda1/cuda.device, the ledger 0",
    ),
    "more of a second slot than there is": (
        replace(
            GOOD,
            capacities=GOOD.capacities | {"cuda/cuda0/cuda.mem": 10},
            holdings=GOOD.holdings | {"cuda/cuda0/cuda.mem": {"k1": 6, "k2": 5}},
        ),
        "capacity",
        "cuda/cuda0/cuda.mem: 11 of 10 are held, by k1, k2",
    ),
    "holds another slot of the device": (
        replace(
            GOOD,
            present=present(
                k2=Present(
                    "2",
                    is_alive=True,
                    given={"cuda/cuda0/cuda.device": 40, "cuda/cuda0/cuda.mem": 5},
                )
            ),
        ),
        "accounted",
        "kernel k2 has 5 of cuda/cuda0/cuda.mem, the ledger 0",
    ),
    "held to other cores": (
        replace(
            GOOD,
            capacities=GOOD.capacities | {"cpu/0/cpu": 2},
            holdings=GOOD.holdings | {"cpu/0/cpu": {"k4": 1, "k2": 1}},
            accounted=accounted(k4=RecordedKernel("a", RUNNING, "4")),
            present=present(
                k2=Present(
                    "2",
                    is_alive=True,
                    given={"cuda/cuda0/cuda.device": 40, "cpu/0/cpu": 1},
                    held_to={"cpu/0/cpu": 1, "cpu/1/cpu": 1},
                ),
                k4=Present(
                    "4",
                    is_alive=True,
                    given={"cpu/0/cpu": 1},
                    held_to={"cpu/0/cpu": 1, "mem/root/mem": 7},
                ),
            ),
        ),
        "limits",
        "kernel k2 has 1 of cpu/0/cpu, but its limits are 1 of cpu/0/cpu, 1 of cpu/1/cpu",
    ),
    "held to more memory": (
        replace(
            GOOD,
            present=present(
                k3=Present(
                    "3", is_alive=True, given={"mem/root/mem": 500}, held_to={"mem/root/mem": 600}
                )
            ),
        ),
        "limits",
        "kernel k3 has 500 of mem/root/mem, but its limits are 600 of mem/root/mem",
    ),
    "a holder that has ended": (
        replace(GOOD, holdings=GOOD.holdings | {"cuda/cuda1/cuda.device": {"k4": 1}}),
        "ghost",
        "kernel k4 holds devices but is terminated",
    ),
    "a holder that nobody knows": (
        replace(GOOD, holdings=GOOD.holdings | {"cuda/cuda1/cuda.device": {"k9": 1}}),
        "ghost",
        "kernel k9 holds devices but is unknown",
    ),
    "booked as alive and gone": (
        replace(GOOD, present=present(k2=None)),
        "ghost",
        "kernel k2 is recorded as running but is not alive",
    ),
    "booked as alive and ended": (
        replace(GOOD, present=present(k2=Present("2", is_alive=False))),
        "ghost",
        "kernel k2 is recorded as running but is not alive",
    ),
    "a claim without a record": (
        replace(GOOD, claims={"claim c1": RecordedClaim("a", is_recorded=False)}),
        "accounted",
        "claim c1 has no record",
    ),
    "a claim of a process that has ended": (
        replace(GOOD, claims={"claim c1": RecordedClaim("a", has_ended=True)}),
        "ghost",
        "claim c1 holds devices but its holder has ended",
    ),
    "something left": (replace(GOOD, strays=("cgroup x",)), "stray", "cgroup x"),
}


def test_a_node_in_order_has_no_violation() -> None:
    assert violations(GOOD) == []
    starting = accounted(k5=RecordedKernel("a", KernelState.CREATING, None))
    assert violations(replace(GOOD, accounted=starting)) == []
    held_whole = {**GOOD.holdings, "cuda/cuda1/cuda.device": {"k1": 0, "k3": 0}}
    assert violations(replace(GOOD, holdings=held_whole)) == []
    assert violations(replace(GOOD, is_shared=True)) == []


@pytest.mark.parametrize("name", CASES)
def test_one_thing_out_of_order_is_one_violation(name: str) -> None:
    snapshot, rule, detail = CASES[name]
    assert violations(snapshot) == [Violation(rule, detail)]


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (replace(GOOD, present=present(k1=None)), "kernel k1 was 1, is gone"),
        (replace(GOOD, present=present(k1=Present("7", is_alive=True))), "kernel k1 was 1, is 7"),
        (
            replace(GOOD, accounted=accounted(k1=RecordedKernel("a", ENDED, "1"))),
            "kernel k1 is alive but not recorded",
        ),
        (
            replace(GOOD, present=present(k1=Present("1", is_alive=True, given={}))),
            "kernel k1 holds {}",
        ),
    ],
)
def test_live_kernels_must_survive_unchanged(after: NodeSnapshot, why: str) -> None:
    assert lost_kernels(GOOD, GOOD) == []
    assert lost_kernels(GOOD, after) == [Violation("survival", why)]
    assert lost_kernels(GOOD, after, touched={"k1"}) == []


def test_ended_kernels_may_vanish() -> None:
    assert lost_kernels(GOOD, replace(GOOD, present=present(k4=None))) == []
