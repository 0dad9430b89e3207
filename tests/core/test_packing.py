"""Where kernels go so that others still fit, and where a request says that they may."""

import pytest

from agentd.core.allocation import Ledger, Policy, allocate
from agentd.core.devices import DeviceId
from agentd.errors import InsufficientResource
from core.machines import cores, gpus, machine, memory, shared
from core.placing import CENT, EVENLY, SNUG, given_ids, numa, place, slots


def test_small_kernels_leave_whole_nodes_to_larger_ones() -> None:
    """1, 1 and 4 GPUs on two nodes of 4: under `fill` the four are on one."""
    ledger = Ledger()
    for kernel_id, count in (("k1", 1), ("k2", 1), ("k3", 4)):
        devices = [*cores(2), *numa(0, 0, 0, 0, 1, 1, 1, 1)]
        got = place(devices, slots(cuda_device=count), SNUG, ledger=ledger)
        ledger = ledger.with_held(kernel_id, "a", got)
    assert sorted(given_ids(got, "cuda")) == ["cuda4", "cuda5", "cuda6", "cuda7"]


def named(*ids: str) -> dict[str, frozenset[DeviceId]]:
    return {"cuda": frozenset(DeviceId("cuda", device_id) for device_id in ids)}


@pytest.mark.parametrize(
    ("only", "asked", "expected"),
    [
        (named("cuda1", "cuda3"), 1, {"cuda1": 1}),
        (named("cuda1", "cuda3"), 2, {"cuda1": 1, "cuda3": 1}),
        (named("cuda3"), 1, {"cuda3": 1}),
        ({"rocm": frozenset()}, 1, {"cuda0": 1}),
    ],
)
def test_a_request_may_name_the_devices_to_choose_from(only, asked, expected) -> None:
    node = shared(machine(*cores(2), *gpus(1, 1, 1, 1), memory()), "a")
    part = node.partitions["a"]
    got = allocate(Ledger(), node.inventory, part, slots(cuda_device=asked), EVENLY, only)
    assert given_ids(got, "cuda") == expected


def test_what_a_request_did_not_name_is_not_given_and_the_refusal_says_so() -> None:
    node = shared(machine(*cores(2), *gpus(1, 1), memory(), quantum=CENT), "a")
    part = node.partitions["a"]
    with pytest.raises(InsufficientResource) as refused:
        allocate(Ledger(), node.inventory, part, slots(cuda_device=2), EVENLY, named("cuda1"))
    assert refused.value.free == "1"
    first, second = refused.value.explain
    assert first["reason"] == "not among the devices that the request names"
    assert (second["considered"], second["free"]) == (True, "1")
    whole = Policy()
    with pytest.raises(InsufficientResource):
        allocate(Ledger(), node.inventory, part, slots(cuda_device=1.5), whole, named("cuda1"))
    got = allocate(Ledger(), node.inventory, part, slots(cuda_device=0.5), whole, named("cuda1"))
    assert given_ids(got, "cuda") == {"cuda1": 0.5}
