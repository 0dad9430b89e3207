from dataclasses import replace

import pytest

from agentd.core.adoption import adopt, located, recalled
from agentd.core.devices import DeviceId
from agentd.core.kernel import KernelState
from agentd.core.ledger import UNREADABLE_SLOT, Allocation, Ledger, Share
from agentd.core.observation import ObservedState
from agentd.core.reconcile import reconcile
from agentd.core.slots import ONE, SlotKind
from core.kernels import GPU, HELD, KERNEL, MEM, NODE, encoded, found
from core.machines import cores, gpus, machine, memory


def test_a_share_is_charged_to_the_physical_device_whatever_it_is_called_now() -> None:
    swapped = [
        replace(d, device_id=DeviceId("cuda", "cuda1" if n == 0 else "cuda0"))
        for n, d in enumerate(gpus(1, 1))
    ]
    node = machine(*cores(4), memory(), *swapped)
    kernel = adopt(found(), node).kernel
    assert kernel.allocation.shares[0].device_id.id == "cuda1"


def test_a_device_that_nobody_knows_joins_as_gone_without_taking_a_name() -> None:
    node = machine(*cores(4), memory(), *(replace(d, stable_id="GPU-new") for d in gpus(1)))
    action = adopt(found(), node)
    (missing,) = action.missing
    assert missing.gone
    assert missing.device_id == ("cuda", "GPU-cuda-0")
    assert action.kernel.allocation.shares[0].device_id == missing.device_id


def test_a_damaged_record_is_recovered_from_the_second_statement() -> None:
    kernel = adopt(found(record="{"), NODE).kernel
    assert kernel.state is KernelState.RUNNING
    assert kernel.allocation == HELD
    assert kernel.slots == {"cuda.device": "1", "mem": "4096"}
    assert "recovered" in kernel.reason
    foreign = adopt(found(record=encoded(kernel_id="k2")), NODE).kernel
    assert "record of k2" in foreign.reason


def test_what_cannot_be_read_at_all_keeps_back_what_it_might_hold() -> None:
    kernel = adopt(found(record="", statement="", cores=("1",), memory_bytes=64), NODE).kernel
    assert kernel.state is KernelState.UNREADABLE
    ledger = Ledger().with_held("k1", "a", kernel.allocation)
    free = {d.device_id.id for d in NODE.devices if not ledger.holders(d.device_id)}
    assert free == {"0", "2", "3"}
    assert ledger.used(DeviceId("mem", "root")) == 64
    assert all(ledger.kept_back_by(d) for d in NODE.by_name["cuda"])
    unlimited = adopt(found(record="", statement=""), NODE).kernel
    ledger = Ledger().with_held("k1", "a", unlimited.allocation)
    assert all(ledger.kept_back_by(d) for d in NODE.devices)
    ended = adopt(found(ObservedState.EXITED, record="", statement=""), NODE).kernel
    assert ended.state is KernelState.TERMINATED


def test_a_device_that_a_damaged_record_names_twice_is_charged_once_and_comes_back() -> None:
    device = NODE.by_name["cuda"][0]
    share = Share(device.device_id, device.stable_id, device.slot, device.kind, 1000)
    allocation, _ = located(Allocation((share, share)), NODE)
    ledger = Ledger().with_held("k1", "a", allocation)
    assert ledger.used(device.device_id) == 2000
    assert ledger.without("k1") == Ledger()
    other = share._replace(slot="old.slot")
    (merged,) = located(Allocation((share, other)), NODE)[0].shares
    assert merged.slot == UNREADABLE_SLOT


def test_a_record_keeps_devices_back_and_never_creates_renames_or_moves_one() -> None:
    """Whatever names a record gives to devices, by stable ids that are there or are not."""
    shares = [
        GPU._replace(device_id=DeviceId("cuda", "cuda1"), stable_id="GPU-nobody"),
        GPU._replace(device_id=DeviceId("tpu", "tpu0"), stable_id="GPU-cuda-1"),
        GPU._replace(device_id=DeviceId("evil", "evil0"), stable_id="X"),
    ]
    text = encoded(allocation=Allocation(tuple(shares)), agent_id="b")
    action = adopt(found(record=text), NODE)
    assert all(device.is_hearsay and device.gone for device in action.missing)
    after = NODE
    for device in action.missing:
        after = after.with_device(device)
    assert [after.by_id[d.device_id] for d in NODE.devices] == list(NODE.devices)
    assert after.slot_types == NODE.slot_types
    ids = {share.stable_id: share.device_id for share in action.kernel.allocation.shares}
    assert ids["GPU-cuda-1"] == DeviceId("cuda", "cuda1")
    assert ids["GPU-nobody"] == DeviceId("cuda", "GPU-nobody")


@pytest.mark.parametrize("text", ["{", ""])
def test_a_remembered_kernel_whose_record_cannot_be_read_holds_everything(text: str) -> None:
    kernel = recalled("k1", text, "docker", NODE, 5.0).kernel
    assert {share.device_id for share in kernel.allocation.shares} == set(NODE.by_id)
    assert (kernel.state, kernel.runtime) == (KernelState.CREATING, "docker")
    assert "cannot be read" in kernel.reason


def test_a_remembered_kernel_is_what_its_record_says_under_the_name_of_its_file() -> None:
    kernel = recalled("k9", encoded(), "other", NODE, 5.0).kernel
    assert kernel == replace(KERNEL, kernel_id="k9")


@pytest.mark.parametrize(
    ("changes", "degraded"),
    [
        ({}, ()),
        ({"memory_bytes": 4096, "cores": ("2", "1")}, ()),
        ({"memory_bytes": 8192}, ("mem: limited to 8192 instead of 4096 bytes",)),
        ({"memory_bytes": 0}, ("mem: not limited instead of 4096 bytes",)),
        ({"cores": ("0", "1")}, ("cpu: runs on 0, 1 instead of 1, 2",)),
        ({"memory_bytes": 1, "cores": ("3",), "is_partial": True}, ()),
    ],
)
def test_limits_that_somebody_changed_are_noticed_and_found_mended(changes, degraded) -> None:
    held = tuple(Share(DeviceId("cpu", n), f"cpu-{n}", "cpu", SlotKind.COUNT, ONE) for n in "12")
    record = encoded(allocation=Allocation((MEM, *held)), not_enforced=())
    item = found(record=record, **changes)
    assert adopt(item, NODE).kernel.degraded == degraded
    known = {"k1": adopt(found(record=record), NODE).kernel}
    actions = reconcile(known, [item], NODE)
    assert [action.kernel.degraded for action in actions] == [degraded] * bool(degraded)
    if degraded:
        (mended,) = reconcile({"k1": actions[0].kernel}, [found(record=record)], NODE)
        assert mended.kernel.degraded == ()
    unlimited = encoded(allocation=Allocation((MEM, *held)), not_enforced=("cpu", "mem"))
    assert adopt(found(record=unlimited, **changes), NODE).kernel.degraded == ()
