from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd.core.allocation import Allocation, Ledger, Share
from agentd.core.devices import DeviceId, Inventory
from agentd.core.kernel import Ending, Kernel, KernelState, Port
from agentd.core.ledger import UNREADABLE_SLOT
from agentd.core.reconcile import (
    Adopt,
    DropUnborn,
    FoundKernel,
    FoundState,
    MarkLost,
    RemoveNeverRan,
    adopted,
    located,
    reconcile,
    stopped,
)
from agentd.core.record import (
    Record,
    RecordedShare,
    RecordError,
    decode,
    encode,
    read_statement,
    statement,
)
from agentd.core.slots import ONE, SlotKind
from core.machines import cores, gpus, machine, memory

NODE = machine(*cores(4), memory(), *gpus(1, 1))
GPU = RecordedShare(
    Share(DeviceId("cuda", "cuda0"), "cuda.device", SlotKind.COUNT, ONE), "GPU-cuda-0"
)
MEM = RecordedShare(Share(DeviceId("mem", "root"), "mem", SlotKind.BYTES, 4096), "mem-root")
RECORD = Record("k1", "a", "n", "hash", 5.0, {"cuda.device": "1"}, (GPU, MEM), ("mem",))


def found(state: FoundState = FoundState.RUNNING, **changes) -> FoundKernel:
    base = FoundKernel(
        "k1", "a", "docker", "c1", state, encode(RECORD), statement((GPU, MEM)), 6.0,
        Ending(3, finished_at=7.0),
    )  # fmt: skip
    return replace(base, **changes)


def known(state: KernelState = KernelState.RUNNING, **changes) -> dict[str, Kernel]:
    kernel = replace(adopted(found(), NODE).kernel, state=state, **changes)
    return {"k1": kernel}


def test_records_and_statements_come_back_as_they_were() -> None:
    assert decode(encode(RECORD)) == RECORD
    assert read_statement(statement(RECORD.shares)) == RECORD.shares
    assert statement(RECORD.shares) == (
        "cuda/cuda0/cuda.device=1@GPU-cuda-0 mem/root/mem=4096B@mem-root"
    )


@given(st.text() | st.binary().map(lambda b: b.decode("latin-1")))
def test_no_text_makes_a_reader_do_anything_but_refuse(text) -> None:
    for read in (decode, read_statement):
        try:
            read(text)
        except RecordError as error:
            assert str(error)


@given(st.integers(0, len(encode(RECORD)) - 1), st.integers(0, 255))
def test_a_damaged_record_is_refused_or_read_as_some_record(position, byte) -> None:
    damaged = encode(RECORD)[:position] + chr(byte) + encode(RECORD)[position + 1 :]
    try:
        assert isinstance(decode(damaged), Record)
    except RecordError as error:
        assert str(error)


def test_a_newer_schema_is_refused_and_unknown_members_are_not() -> None:
    text = encode(RECORD)
    with pytest.raises(RecordError, match="newer"):
        decode(text.replace('"schema":1', '"schema":2'))
    assert decode(text.replace('"schema":1', '"schema":1,"extra":{"a":[1]}')) == RECORD


@pytest.mark.parametrize("time", ["1e300", "NaN", "Infinity", "-1", '"x"', "null"])
def test_a_time_that_cannot_be_shown_makes_a_record_unreadable(time) -> None:
    text = encode(RECORD).replace('"created_at":5.0', f'"created_at":{time}')
    with pytest.raises(RecordError, match="is no time"):
        decode(text)


def test_two_lost_devices_of_one_name_stay_two() -> None:
    other = encode(replace(RECORD, kernel_id="k2", shares=(replace(GPU, stable_id="GPU-x"),)))
    node = machine(*cores(4), memory())
    actions = reconcile({}, [found(), found(kernel_id="k2", record=other)], node)
    ids = [action.kernel.allocation.shares[0].device_id.id for action in actions]
    assert len(set(ids)) == 2


def test_an_unknown_kernel_is_adopted_with_its_devices() -> None:
    (action,) = reconcile({}, [found()], NODE)
    assert isinstance(action, Adopt)
    kernel = action.kernel
    assert (kernel.state, kernel.handle, kernel.spec_hash) == (KernelState.RUNNING, "c1", "hash")
    assert kernel.allocation == Allocation((GPU.share, MEM.share))
    assert kernel.not_enforced == ("mem",)


@pytest.mark.parametrize(
    ("state", "before", "after"),
    [
        (FoundState.EXITED, KernelState.RUNNING, KernelState.TERMINATED),
        (FoundState.EXITED, KernelState.STOPPING, KernelState.TERMINATED),
        (FoundState.PAUSED, KernelState.RUNNING, KernelState.PAUSED),
        (FoundState.RUNNING, KernelState.PAUSED, KernelState.RUNNING),
        (FoundState.RUNNING, KernelState.TERMINATED, KernelState.RUNNING),
        (FoundState.RUNNING, KernelState.CREATING, KernelState.RUNNING),
        (FoundState.RUNNING, KernelState.LOST, KernelState.RUNNING),
        (FoundState.RUNNING, KernelState.RUNNING, None),
        (FoundState.RUNNING, KernelState.STOPPING, None),
        (FoundState.EXITED, KernelState.TERMINATED, None),
    ],
)
def test_a_known_kernel_follows_what_is_found(state, before, after) -> None:
    kernels = known(before)
    if after is None and before is KernelState.TERMINATED:
        kernels = {k: replace(v, ending=found(state).ending) for k, v in kernels.items()}
    actions = reconcile(kernels, [found(state)], NODE)
    if after is None:
        assert actions == []
        return
    (action,) = actions
    assert action.kernel.state is after
    assert action.kernel.ending.exit_code == (3 if state is FoundState.EXITED else None)


def test_what_was_never_started_is_removed() -> None:
    item = found(FoundState.CREATED)
    assert reconcile({}, [item], NODE) == [RemoveNeverRan(item)]
    assert reconcile(known(KernelState.CREATING), [item], NODE) == [RemoveNeverRan(item)]
    assert reconcile(known(KernelState.CREATING), [item], NODE, busy=["k1"]) == []


def test_only_a_complete_list_without_it_makes_a_kernel_lost() -> None:
    assert reconcile(known(), [], NODE) == [MarkLost("k1")]
    assert reconcile(known(), [], NODE, busy=["k1"]) == []
    assert reconcile(known(KernelState.TERMINATED), [], NODE) == [MarkLost("k1")]
    assert reconcile(known(KernelState.LOST), [], NODE) == []
    assert reconcile(known(KernelState.FAILED), [], NODE) == []


def test_an_unknown_outcome_is_settled_only_after_its_grace() -> None:
    creating = known(KernelState.CREATING)
    assert reconcile(creating, [], NODE) == []
    assert reconcile(creating, [], NODE, expired=["k1"]) == [DropUnborn("k1")]


def test_a_share_is_charged_to_the_physical_device_whatever_it_is_called_now() -> None:
    swapped = [
        replace(d, device_id=DeviceId("cuda", "cuda1" if n == 0 else "cuda0"))
        for n, d in enumerate(gpus(1, 1))
    ]
    node = machine(*cores(4), memory(), *swapped)
    kernel = adopted(found(), node).kernel
    assert kernel.allocation.shares[0].device_id.id == "cuda1"


def test_a_device_that_nobody_knows_joins_as_gone_without_taking_a_name() -> None:
    node = machine(*cores(4), memory(), *(replace(d, stable_id="GPU-new") for d in gpus(1)))
    action = adopted(found(), node)
    (missing,) = action.missing
    assert missing.gone
    assert missing.device_id == ("cuda", "GPU-cuda-0")
    assert action.kernel.allocation.shares[0].device_id == missing.device_id


def test_a_damaged_record_is_recovered_from_the_second_statement() -> None:
    kernel = adopted(found(record="{"), NODE).kernel
    assert kernel.state is KernelState.RUNNING
    assert kernel.allocation == Allocation((GPU.share, MEM.share))
    assert kernel.slots == {"cuda.device": "1", "mem": "4096"}
    assert "recovered" in kernel.reason
    foreign = adopted(found(record=encode(replace(RECORD, kernel_id="k2"))), NODE).kernel
    assert "record of k2" in foreign.reason


def test_what_cannot_be_read_at_all_keeps_back_what_it_might_hold() -> None:
    kernel = adopted(found(record="", statement="", cores=("1",), memory_bytes=64), NODE).kernel
    assert kernel.state is KernelState.UNREADABLE
    ledger = Ledger().with_held("k1", "a", kernel.allocation)
    free = {d.device_id.id for d in NODE.devices if not ledger.holders(d.device_id)}
    assert free == {"0", "2", "3"}
    assert ledger.used(DeviceId("mem", "root")) == 64
    assert all(ledger.kept_back_by(d) for d in NODE.by_name["cuda"])
    unlimited = adopted(found(record="", statement=""), NODE).kernel
    ledger = Ledger().with_held("k1", "a", unlimited.allocation)
    assert all(ledger.kept_back_by(d) for d in NODE.devices)
    ended = adopted(found(FoundState.EXITED, record="", statement=""), NODE).kernel
    assert ended.state is KernelState.TERMINATED


def test_a_device_that_a_damaged_record_names_twice_is_charged_once_and_comes_back() -> None:
    device = NODE.by_name["cuda"][0]
    share = Share(device.device_id, device.slot, device.kind, 1000)
    twice = [RecordedShare(share, device.stable_id)] * 2
    allocation, _ = located(twice, NODE)
    ledger = Ledger().with_held("k1", "a", allocation)
    assert ledger.used(device.device_id) == 2000
    assert ledger.without("k1") == Ledger()
    other = RecordedShare(share._replace(slot="old.slot"), device.stable_id)
    (merged,) = located([twice[0], other], NODE)[0].shares
    assert merged.slot == UNREADABLE_SLOT


def test_an_ending_that_was_not_known_is_learnt_and_a_list_s_entry_teaches_nothing() -> None:
    ended = known(KernelState.TERMINATED)
    (action,) = reconcile(ended, [found(FoundState.EXITED)], NODE)
    assert isinstance(action, Adopt)
    assert action.kernel.ending == found(FoundState.EXITED).ending
    partial = replace(found(FoundState.EXITED), ending=Ending(), started_at=None, is_partial=True)
    assert reconcile({"k1": action.kernel}, [partial], NODE) == []


def test_a_restart_by_hand_is_seen_by_its_time() -> None:
    again = replace(found(), started_at=99.0)
    (action,) = reconcile(known(KernelState.RUNNING), [again], NODE)
    assert isinstance(action, Adopt)
    assert (action.kernel.state, action.kernel.started_at) == (KernelState.RUNNING, 99.0)


def test_ports_of_a_record_without_them_are_the_runtime_s() -> None:
    ports = (Port(80, 30000, "tcp", "127.0.0.1"),)
    (action,) = reconcile({}, [replace(found(), ports=ports)], NODE)
    assert isinstance(action, Adopt)
    assert action.kernel.ports == ports


@pytest.mark.parametrize("handle", ["", "h"])
def test_what_was_seen_to_run_did_whatever_is_left_of_it(handle: str) -> None:
    known = Kernel("k1", "a", KernelState.RUNNING, "", 1.0, "fake", handle="h", started_at=2.0)
    item = FoundKernel("k1", "a", "fake", handle, FoundState.CREATED, "", "")
    (action,) = reconcile({"k1": known}, [item], Inventory.of([], []))
    assert isinstance(action, Adopt)
    assert (action.kernel.state, action.kernel.handle) == (KernelState.TERMINATED, "h")
    assert "damaged" in action.kernel.ending.reason
    other = replace(item, handle="another")
    (action,) = reconcile({"k1": known}, [other], Inventory.of([], []))
    assert action == RemoveNeverRan(other)
    assert stopped(known, item, Inventory.of([], [])).state is KernelState.TERMINATED
    assert stopped(known, None, Inventory.of([], [])).state is KernelState.LOST
