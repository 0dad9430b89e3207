import msgspec
import pytest
from msgspec.structs import replace

from agentd.core.allocation.ledger import UNREADABLE_SLOT, Allocation, Ledger, Share
from agentd.core.allocation.ports import Port
from agentd.core.devices import DeviceId
from agentd.core.kernel.adoption import adopt, adopt_record, resolve_devices
from agentd.core.kernel.reconcile import reconcile
from agentd.core.kernel.record import encode, encode_device_label
from agentd.core.kernel.states import KernelState, ObservedState
from agentd.core.slots import ONE, SlotKind
from agentd.rpc.rendering import kernel_view
from core.kernels import GPU, HELD, KERNEL, MEM, NODE, encoded, found
from support.damage import every_flip, odd_records


def test_a_damaged_record_is_recovered_from_the_second_statement() -> None:
    kernel = adopt(found(record="{"), NODE).kernel
    assert kernel.state is KernelState.RUNNING
    assert kernel.allocation == HELD
    assert kernel.slots == {"cuda.device": "1", "mem": "4096"}
    assert "recovered" in kernel.reason
    foreign = adopt(found(record=encoded(kernel_id="k2")), NODE).kernel
    assert "record of kernel k2" in foreign.reason


def test_no_flipped_bit_of_a_record_frees_or_takes_a_device() -> None:
    """The device label has the devices; a record in the state folder alone may hold any."""
    for text in every_flip(encoded()):
        kernel = adopt(found(record=text), NODE).kernel
        assert (kernel.state, kernel.allocation) == (KernelState.RUNNING, HELD), text
        saved = adopt_record("k1", text, "docker", NODE, 1.0).kernel
        held = {share.device_id for share in saved.allocation.shares}
        assert held >= {share.device_id for share in HELD.shares}, text


def test_no_value_in_a_record_breaks_a_list() -> None:
    for text in odd_records(encoded(labels={"a": "b"}, ports=(Port(1, 2),), creator_uid=5)):
        update = adopt_record("k1", text, "docker", NODE, 1.0)
        kernel = update.kernel.with_observation(ObservedState.RUNNING)
        inventory = NODE
        for device in update.missing:
            inventory = inventory.with_device(device)
        assert msgspec.json.encode(kernel_view(kernel, inventory))


@pytest.mark.parametrize("statement", ["", encode_device_label(HELD)], ids=["nothing", "statement"])
def test_a_kernel_with_a_damaged_record_still_uses_its_claim(statement: str) -> None:
    """Else the claim would be charged with the devices of the kernel, too."""
    before = replace(adopt(found(), NODE).kernel, claim_id="c1", keeps_claim=True)
    kernel = adopt(found(record="{", device_label=statement), NODE, before).kernel
    assert (kernel.claim_id, kernel.keeps_claim) == ("c1", True)


def test_unreadable_kernel_quarantines_its_possible_devices() -> None:
    kernel = adopt(found(record="", device_label="", cores=("1",), memory_bytes=64), NODE).kernel
    assert kernel.state is KernelState.UNREADABLE
    ledger = Ledger().with_holding("k1", "a", kernel.allocation)
    free = {d.device_id.id for d in NODE.devices if not ledger.holders(d.device_id)}
    assert free == {"0", "2", "3"}
    assert ledger.used(DeviceId("mem", "root")) == 64
    assert all(ledger.whole_device_holders(d) for d in NODE.by_name["cuda"])
    unlimited = adopt(found(record="", device_label=""), NODE).kernel
    ledger = Ledger().with_holding("k1", "a", unlimited.allocation)
    assert all(ledger.whole_device_holders(d) for d in NODE.devices)
    ended = adopt(found(ObservedState.EXITED, record="", device_label=""), NODE).kernel
    assert ended.state is KernelState.TERMINATED


def test_device_named_twice_in_a_record_is_charged_once() -> None:
    device = NODE.by_name["cuda"][0]
    share = Share(device.device_id, device.stable_id, device.slot, device.kind, 1000)
    allocation, _ = resolve_devices(Allocation((share, share)), NODE)
    ledger = Ledger().with_holding("k1", "a", allocation)
    assert ledger.used(device.device_id) == 2000
    assert ledger.without("k1") == Ledger()
    other = replace(share, slot="old.slot")
    (merged,) = resolve_devices(Allocation((share, other)), NODE)[0].shares
    assert merged == other
    whole = replace(share, amount=ONE)
    assert resolve_devices(Allocation((whole, other)), NODE)[0].shares == (whole,)
    assert resolve_devices(Allocation((whole, whole)), NODE)[0].shares == (whole,)


def test_shares_of_two_slots_hold_the_device_whole_and_are_shown() -> None:
    """Whatever the two slots are, the wire names the device and nothing of it is left."""
    device = NODE.by_name["cuda"][0]
    part = Share(device.device_id, device.stable_id, device.slot, device.kind, 1000)
    unreadable = replace(part, slot=UNREADABLE_SLOT, amount=0)
    old, older = replace(part, slot="old.slot"), replace(part, slot="older.slot")
    pairs = [(part, old), (old, older), (GPU, old), (GPU, unreadable), (old, unreadable)]
    for pair in [*pairs, *(pair[::-1] for pair in pairs)]:
        held, _ = resolve_devices(Allocation(pair), NODE)
        ledger = Ledger().with_holding("k1", "a", held)
        (slots,) = held.to_wire().values()
        ((slot, ids),) = slots.items()
        assert ids.keys() == {"cuda0"}, pair
        assert ledger.whole_device_holders(device) or (slot, ids["cuda0"]) == (device.slot, "1"), (
            pair
        )
        assert ledger.used(device.device_id) <= device.capacity, pair
    held, _ = resolve_devices(Allocation((part, unreadable)), NODE)
    assert held.shares == (unreadable,)


def test_record_never_creates_renames_or_moves_a_device() -> None:
    """Whatever names a record gives to devices, by stable ids that are there or are not."""
    shares = [
        replace(GPU, device_id=DeviceId("cuda", "cuda1"), stable_id="GPU-nobody"),
        replace(GPU, device_id=DeviceId("tpu", "tpu0"), stable_id="GPU-cuda-1"),
        replace(GPU, device_id=DeviceId("evil", "evil0"), stable_id="X"),
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


EVIL = Share(DeviceId("cuda", "evil0"), "X", "cuda.device", SlotKind.COUNT, ONE)
OTHER = Share(DeviceId("cuda", "cuda1"), "GPU-cuda-1", "cuda.device", SlotKind.COUNT, ONE)
ZERO = replace(GPU, amount=0)
EDITED = {
    "nothing": ((), {"GPU-cuda-0": ONE}, "says nothing else"),
    "another-device": ((OTHER,), {"GPU-cuda-0": ONE, "GPU-cuda-1": ONE}, "cuda/cuda1"),
    "another-stable-id": ((replace(GPU, stable_id="X"),), {"GPU-cuda-0": ONE, "X": ONE}, "@X"),
    "unlisted-device": ((EVIL,), {"GPU-cuda-0": ONE, "X": ONE}, "cuda/evil0"),
    "another-name": ((replace(GPU, device_id=OTHER.device_id),), {"GPU-cuda-0": ONE}, "cuda1"),
    "less": ((replace(GPU, amount=1),), {"GPU-cuda-0": ONE}, "=0.000001@"),
    "more": ((replace(GPU, amount=ONE + 1),), {"GPU-cuda-0": ONE}, "=1.000001@"),
    "another-slot": (
        (replace(GPU, slot="x.y"),),
        {"GPU-cuda-0": ONE},
        (
            "its record says cuda/cuda0/x.y=1@GPU-cuda-0 and its device label"
            " cuda/cuda0/cuda.device=1@GPU-cuda-0; the devices of both are charged"
        ),
    ),
    "twice": ((GPU, GPU), {"GPU-cuda-0": ONE}, "duplicate device cuda/cuda0 (GPU-cuda-0)"),
    "two-slots": ((GPU, replace(GPU, slot="x.y")), {"GPU-cuda-0": ONE}, "x.y=1"),
    "zero": ((ZERO,), {"GPU-cuda-0": ONE}, "amount of cuda/cuda0: got 0"),
}


@pytest.mark.parametrize(("shares", "held", "said"), EDITED.values(), ids=EDITED)
def test_a_kernel_holds_record_and_second_statement(shares, held, said) -> None:
    text = encoded(allocation=Allocation(shares))
    stated = encode_device_label(Allocation((GPU,)))
    adoption = adopt(found(record=text, device_label=stated), NODE)
    kernel = adoption.kernel
    assert {s.stable_id: s.amount for s in kernel.allocation.shares} == held
    assert kernel.state is KernelState.RUNNING
    assert said in kernel.reason
    assert "device label" in kernel.reason
    assert kernel.allocation.to_wire()["cuda"]["cuda.device"].keys() >= {"cuda0"}
    assert [device.device_id.id for device in adoption.missing] == ["X"] * ("X" in held)
    assert all(device.gone for device in adoption.missing)
    again = adopt_record("k1", encode(kernel, "n"), "docker", NODE, 5.0).kernel
    assert again.allocation == kernel.allocation


def test_order_of_a_statement_does_not_matter() -> None:
    words = encode_device_label(HELD).split()
    item = found(device_label=f" {'  '.join(reversed(words))} ")
    kernel = adopt(item, NODE).kernel
    assert (kernel.reason, kernel.allocation) == ("", HELD)
    twice = found(device_label=f"{words[0]} {encode_device_label(HELD)}")
    assert "unreadable (duplicate device cuda/cuda0" in adopt(twice, NODE).kernel.reason


RECORD_PROBLEMS = {
    "missing": ({}, "its record is missing; recovered"),
    "other": ({"record_problem": "it is k2's"}, "unreadable record (it is k2's); recovered"),
    "both": ({"device_label": ""}, "its record is missing; its devices cannot be recovered"),
}


@pytest.mark.parametrize(("changes", "reason"), RECORD_PROBLEMS.values(), ids=RECORD_PROBLEMS)
def test_reason_says_what_is_wrong_with_the_record(changes, reason) -> None:
    kernel = adopt(found(record="", **changes), NODE).kernel
    assert kernel.reason.startswith(reason)


def test_a_kernel_without_record_counts_from_a_known_time() -> None:
    assert adopt(found(record=""), NODE, now=9.0).kernel.created_at == 6.0
    unknown = found(record="", started_at=None)
    first = adopt(unknown, NODE, now=9.0).kernel
    assert first.created_at == 9.0
    assert adopt(unknown, NODE, first, now=11.0).kernel.created_at == 9.0
    (adoption,) = reconcile({}, [unknown], NODE, now=9.0)
    assert adoption.kernel.created_at == 9.0


UNEQUAL = {
    "removed": ({"device_label": ""}, {}, True),
    "unreadable": ({"device_label": "cuda"}, {}, True),
    "never-written": ({"device_label": ""}, {"not_enforced": ("statement",)}, False),
    "ended": ({"device_label": "", "state": ObservedState.EXITED}, {}, False),
    "equal": ({}, {}, False),
    "nothing-held": ({"device_label": ""}, {"allocation": Allocation()}, False),
}


@pytest.mark.parametrize(("changes", "recorded", "is_told"), UNEQUAL.values(), ids=UNEQUAL)
def test_a_second_statement_is_missed_while_it_runs(changes, recorded, is_told) -> None:
    kernel = adopt(found(record=encoded(**recorded), **changes), NODE).kernel
    assert kernel.allocation == recorded.get("allocation", HELD)
    assert ("device label" in kernel.reason) is is_told


def test_an_unlisted_device_takes_no_id_of_a_listed_one() -> None:
    """The stable id of the record is the id of a listed device."""
    text = encoded(allocation=Allocation((replace(EVIL, stable_id="cuda1"),)))
    (missing,) = adopt(found(record=text, device_label=""), NODE).missing
    assert missing.device_id == ("cuda", "missing-cuda1")


@pytest.mark.parametrize("text", ["{", ""])
def test_recorded_kernel_holds_everything_when_unreadable(text: str) -> None:
    kernel = adopt_record("k1", text, "docker", NODE, 5.0).kernel
    assert {share.device_id for share in kernel.allocation.shares} == set(NODE.by_id)
    assert (kernel.state, kernel.runtime) == (KernelState.CREATING, "docker")
    assert "cannot be read" in kernel.reason


def test_recorded_kernel_takes_its_id_from_the_file_name() -> None:
    kernel = adopt_record("k9", encoded(), "other", NODE, 5.0).kernel
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
def test_changed_limits_are_degraded_until_restored(changes, degraded) -> None:
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
