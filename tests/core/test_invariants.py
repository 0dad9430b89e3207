import pytest
from msgspec.structs import replace

from agentd.core.invariants import (
    NodeSnapshot,
    PresentKernel,
    RecordedClaim,
    RecordedKernel,
    Violation,
    find_violations,
)
from agentd.core.kernel.states import KernelState
from support.checked_node import lost_kernels

RUNNING, ENDED = KernelState.RUNNING, KernelState.TERMINATED
GPU, OTHER_GPU, GPU_MEMORY = (
    "cuda/cuda0/cuda.device",
    "cuda/cuda1/cuda.device",
    "cuda/cuda0/cuda.mem",
)
CORE, MEMORY = "cpu/0/cpu", "mem/root/mem"


def alive(
    handle: str, given: dict[str, int] | None = None, held_to: dict[str, int] | None = None
) -> PresentKernel:
    return PresentKernel(handle, is_alive=True, allocation=given, limits=held_to)


GOOD = NodeSnapshot(
    is_shared=False,
    capacities={GPU: 100, OTHER_GPU: 100, MEMORY: 1000},
    holdings={GPU: {"k1": 60, "k2": 40}, MEMORY: {"k1": 500, "k3": 500}},
    recorded={
        "k1": RecordedKernel("a", RUNNING, "1"),
        "k2": RecordedKernel("a", RUNNING, "2"),
        "k3": RecordedKernel("b", RUNNING, "3"),
        "k4": RecordedKernel("b", ENDED, "4"),
    },
    present={
        "k1": alive("1", {GPU: 60, MEMORY: 500}),
        "k2": alive("2", {GPU: 40}),
        "k3": alive("3", {MEMORY: 500}),
        "k4": PresentKernel("4", is_alive=False),
    },
    divisible=frozenset({"mem/root"}),
)


def holding(**of_gpu: int) -> dict:
    return GOOD.holdings | {GPU: {"k1": 60, "k2": 40} | of_gpu}


def accounted(**kernels: RecordedKernel) -> dict:
    return {**GOOD.recorded, **kernels}


def present(**kernels: PresentKernel | None) -> dict:
    return {name: item for name, item in {**GOOD.present, **kernels}.items() if item is not None}


CASES = {
    "more than there is": (
        {"is_shared": True, "holdings": holding(k3=1)},
        ("capacity", f"{GPU}: 101 of 100 are held, by k1, k2, k3"),
    ),
    "two agents on one device": (
        {"capacities": GOOD.capacities | {GPU: 200}, "holdings": holding(k3=1)},
        ("owner", "cuda/cuda0 is held by k1, k2, k3, of agents a, b"),
    ),
    "alive and booked as ended": (
        {"present": present(k4=alive("4"))},
        ("accounted", "kernel k4 (4) lives but is terminated"),
    ),
    "alive and in no book": (
        {"present": present(k5=alive("5"))},
        ("stray", "kernel k5 (5) runs but is not recorded"),
    ),
    "ended and in no book": (
        {"present": present(k5=PresentKernel("5", is_alive=False))},
        ("stray", "kernel k5 (5) runs but is not recorded"),
    ),
    "another process than the one booked": (
        {"recorded": accounted(k2=RecordedKernel("a", RUNNING, "9"))},
        ("accounted", "kernel k2 is 2, recorded as 9"),
    ),
    "holds less than it was given": (
        {"holdings": holding(k2=30)},
        ("accounted", f"kernel k2 has 40 of {GPU}, the ledger 30"),
    ),
    "holds nothing of what it was given": (
        {"present": present(k3=alive("3", {OTHER_GPU: 1}))},
        ("accounted", f"kernel k3 has 1 of {OTHER_GPU}, the ledger 0"),
    ),
    "more of a second slot than there is": (
        {
            "capacities": GOOD.capacities | {GPU_MEMORY: 10},
            "holdings": GOOD.holdings | {GPU_MEMORY: {"k1": 6, "k2": 5}},
        },
        ("capacity", f"{GPU_MEMORY}: 11 of 10 are held, by k1, k2"),
    ),
    "holds another slot of the device": (
        {"present": present(k2=alive("2", {GPU: 40, GPU_MEMORY: 5}))},
        ("accounted", f"kernel k2 has 5 of {GPU_MEMORY}, the ledger 0"),
    ),
    "held to other cores": (
        {
            "capacities": GOOD.capacities | {CORE: 2},
            "holdings": GOOD.holdings | {CORE: {"k4": 1, "k2": 1}},
            "recorded": accounted(k4=RecordedKernel("a", RUNNING, "4")),
            "present": present(
                k2=alive("2", {GPU: 40, CORE: 1}, {CORE: 1, "cpu/1/cpu": 1}),
                k4=alive("4", {CORE: 1}, {CORE: 1, MEMORY: 7}),
            ),
        },
        ("limits", f"kernel k2 has 1 of {CORE}, but its limits are 1 of {CORE}, 1 of cpu/1/cpu"),
    ),
    "held to more memory": (
        {"present": present(k3=alive("3", {MEMORY: 500}, {MEMORY: 600}))},
        ("limits", f"kernel k3 has 500 of {MEMORY}, but its limits are 600 of {MEMORY}"),
    ),
    "a holder that has ended": (
        {"holdings": GOOD.holdings | {OTHER_GPU: {"k4": 1}}},
        ("ghost", "kernel k4 holds devices but is terminated"),
    ),
    "a holder that nobody knows": (
        {"holdings": GOOD.holdings | {OTHER_GPU: {"k9": 1}}},
        ("ghost", "kernel k9 holds devices but is unknown"),
    ),
    "booked as alive and gone": (
        {"present": present(k2=None)},
        ("ghost", "kernel k2 is recorded as running but is not alive"),
    ),
    "booked as alive and ended": (
        {"present": present(k2=PresentKernel("2", is_alive=False))},
        ("ghost", "kernel k2 is recorded as running but is not alive"),
    ),
    "a claim without a record": (
        {"claims": {"claim c1": RecordedClaim("a", is_recorded=False)}},
        ("accounted", "claim c1 has no record"),
    ),
    "a claim of a process that has ended": (
        {"claims": {"claim c1": RecordedClaim("a", has_ended=True)}},
        ("ghost", "claim c1 holds devices but its holder has ended"),
    ),
    "something left": ({"strays": ("cgroup x",)}, ("stray", "cgroup x")),
}


def test_a_node_in_order_has_no_violation() -> None:
    assert find_violations(GOOD) == []
    starting = accounted(k5=RecordedKernel("a", KernelState.CREATING, None))
    assert find_violations(replace(GOOD, recorded=starting)) == []
    held_whole = {**GOOD.holdings, OTHER_GPU: {"k1": 0, "k3": 0}}
    assert find_violations(replace(GOOD, holdings=held_whole)) == []
    assert find_violations(replace(GOOD, is_shared=True)) == []


@pytest.mark.parametrize(("changes", "violation"), CASES.values(), ids=CASES)
def test_one_thing_out_of_order_is_one_violation(changes, violation) -> None:
    assert find_violations(replace(GOOD, **changes)) == [Violation(*violation)]


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (replace(GOOD, present=present(k1=None)), "kernel k1 was 1, is gone"),
        (replace(GOOD, present=present(k1=alive("7"))), "kernel k1 was 1, is 7"),
        (
            replace(GOOD, recorded=accounted(k1=RecordedKernel("a", ENDED, "1"))),
            "kernel k1 is alive but not recorded",
        ),
        (replace(GOOD, present=present(k1=alive("1", {}))), "kernel k1 holds {}"),
    ],
)
def test_live_kernels_must_survive_unchanged(after: NodeSnapshot, why: str) -> None:
    assert lost_kernels(GOOD, GOOD) == []
    assert lost_kernels(GOOD, after) == [Violation("survival", why)]
    assert lost_kernels(GOOD, after, touched={"k1"}) == []


def test_ended_kernels_may_vanish() -> None:
    assert lost_kernels(GOOD, replace(GOOD, present=present(k4=None))) == []
