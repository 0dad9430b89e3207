import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agentd.core.access import Caller, Role
from agentd.core.allocation.ledger import Allocation, ClaimRef, Ledger, Share
from agentd.core.allocation.policy import AllocationPolicy
from agentd.core.claim.allocation import (
    allocate_from_claim,
    allocate_observed,
    default_amounts,
    split_slots,
)
from agentd.core.claim.claim import (
    CgroupHolder,
    Claim,
    ClaimHolder,
    EditsTarget,
    NameHolder,
    ProcessHolder,
    TimeHolder,
    merge_allocations,
    subtract_allocations,
)
from agentd.core.claim.record import decode, encode
from agentd.core.devices import DeviceId, Inventory
from agentd.core.kernel.edits import ContainerEdits, DeviceNode, Mount
from agentd.core.kernel.record import NewerRecordError, RecordError
from agentd.core.partition.split import Partition
from agentd.core.slots import ONE, ResourceSlots, SlotKind
from agentd.errors import InsufficientResource
from core import several_slots
from core.machines import cores, gpus, machine, memory
from support.damage import every_flip, of_schema_1, resealed

HOLDERS: list[ClaimHolder] = [
    ProcessHolder(17, 4711),
    CgroupHolder("/system.slice/x.scope", 12),
    TimeHolder(60),
    NameHolder("slurm-17"),
    NameHolder("k8s", survives_reboot=True),
]


def share(number: int, amount: int = ONE) -> Share:
    return Share(
        DeviceId("cuda", f"cuda{number}"),
        f"GPU-cuda-{number}",
        "cuda.device",
        SlotKind.COUNT,
        amount,
    )


def allocation(*numbers: int) -> Allocation:
    return Allocation(tuple(share(number) for number in numbers))


def claim(holder: ClaimHolder = HOLDERS[3], **changes: object) -> Claim:
    made = Claim(
        claim_id="c1",
        agent_id="a",
        holder=holder,
        request_hash="h",
        created_at=1.5,
        boot_id="boot-1",
        slots={"cuda.device": "2"},
        allocation=allocation(0, 1),
        edits_for=EditsTarget.CONTAINER,
        edits=ContainerEdits(
            env={"A": "1"},
            device_nodes=(DeviceNode("/dev/x", "/dev/y"),),
            mounts=(Mount("/a", "/b"),),
            cdi=("nvidia.com/gpu=0",),
        ),
        labels={"engine": "slurm"},
        created_by="agentd",
        owner_uid=1000,
        is_observed=True,
    )
    return replace(made, **changes)


@pytest.mark.parametrize("holder", HOLDERS, ids=str)
def test_a_record_is_read_back(holder: ClaimHolder) -> None:
    made = claim(holder)
    assert decode("c1", encode(made, "n")) == made


@pytest.mark.parametrize(
    "changes",
    [
        {"claim_id": "c2"},
        {"agent_id": "../x"},
        {"holder": {"type": "process", "pid": "17", "start_time": 1}},
        {"holder": {"type": "unknown"}},
        {"allocation": [{"device_name": "cuda"}]},
        {"created_at": "yesterday"},
        {"labels": ["x"]},
        {"edits": {"env": 1}},
        {"schema": True},
        {"holder": {"type": "process", "pid": 2**40, "start_time": 1}},
        {"holder": {"type": "process", "pid": 0, "start_time": 1}},
        {"holder": {"type": "process", "pid": 1, "start_time": 2**64}},
        {"holder": {"type": "cgroup", "cgroup": "/a\0b", "inode": 1}},
        {"holder": {"type": "cgroup", "cgroup": "a", "inode": 1}},
        {"holder": {"type": "cgroup", "cgroup": "/a", "inode": -1}},
        {"holder": {"type": "cgroup", "cgroup": "/\ud800", "inode": 1}},
        {"holder": {"type": "ttl", "ttl": 10**15}},
        {"holder": {"type": "ttl", "ttl": 0}},
        {"owner_uid": 2**32},
        {"created_by": "\udfff"},
        {"created_at": 10**400},
        {"labels": {"a": "b" * 2**16, "\ud800": "c"}},
    ],
    ids=str,
)
def test_a_damaged_record_is_refused(changes: dict[str, object]) -> None:
    old = {**json.loads(of_schema_1(encode(claim(), "n"))), **changes}
    for text in (json.dumps(old), resealed(encode(claim(), "n"), **changes)):
        with pytest.raises(RecordError):
            decode("c1", text)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "1", "[" * 100_000], ids=len)
def test_a_text_that_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(RecordError):
        decode("c1", text)


def test_newer_record_is_told_apart_and_new_members_are_ignored() -> None:
    text = encode(claim(), "n")
    assert decode("c1", resealed(text, more=1)) == claim()
    with pytest.raises(NewerRecordError):
        decode("c1", resealed(text, schema=3))


def test_no_flipped_bit_makes_another_claim() -> None:
    """Not one of another device or holder, not one of another schema, and never an exception."""
    for text in every_flip(encode(claim(), "n")):
        try:
            assert decode("c1", text) == claim(), text
        except NewerRecordError:
            pytest.fail(f"taken for one of a newer agentd: {text}")
        except RecordError as error:
            assert str(error)


def test_a_record_without_a_sum_is_read_and_gets_one() -> None:
    text = of_schema_1(encode(claim(), "n"))
    assert decode("c1", text) == claim()
    again = json.loads(encode(decode("c1", text), "n"))
    assert (again["schema"], len(again["sum"])) == (2, 16)
    del again["sum"]
    with pytest.raises(RecordError, match="damaged"):
        decode("c1", json.dumps(again))


@pytest.mark.parametrize("holder", HOLDERS, ids=str)
def test_a_reboot_ends_all_but_what_survives_it(holder: ClaimHolder) -> None:
    made = claim(holder)
    survives = isinstance(holder, NameHolder) and holder.survives_reboot
    assert not made.is_ended_by_reboot("boot-1")
    assert made.is_ended_by_reboot("boot-2") is not survives


@pytest.mark.parametrize(
    ("caller", "may"),
    [
        (Caller("x", Role.AGENT, frozenset({"a"}), uid=1000), True),
        (Caller("x", Role.AGENT, frozenset({"a"}), uid=1001), False),
        (Caller("x", Role.AGENT, frozenset({"a"})), False),
        (Caller("x", Role.AGENT, frozenset({"b"}), uid=1000), False),
        (Caller("x", Role.AGENT, frozenset({"a"}), uid=1000, via="gateway"), False),
        (Caller("x", Role.ADMIN), True),
        (Caller("x", Role.ADMIN, via="gateway"), True),
    ],
    ids=str,
)
def test_an_owned_claim_is_used_by_its_owner_and_admins(caller: Caller, may: bool) -> None:
    assert claim().may_be_used_by(caller) is may
    assert claim(owner_uid=None).may_be_used_by(caller) is caller.sees("a")


amounts = st.integers(0, 5 * ONE)


@given(st.lists(amounts, min_size=1, max_size=4), st.lists(amounts, max_size=4))
def test_what_remains_and_what_was_taken_are_the_whole(held: list[int], taken: list[int]) -> None:
    def of(numbers: Iterable[int]) -> Allocation:
        return Allocation(tuple(share(n, amount) for n, amount in enumerate(numbers) if amount))

    left = {s.stable_id: s.amount for s in subtract_allocations(of(held), [of(taken)]).shares}
    for number, amount in enumerate(held):
        gone = taken[number] if number < len(taken) else 0
        assert left.get(f"GPU-cuda-{number}", 0) == max(0, amount - gone)
    assert all(left.values())


def test_a_union_has_each_device_once() -> None:
    found = merge_allocations([allocation(0, 1), allocation(2), allocation(1)])
    assert [(s.device_id.id, s.amount) for s in found.shares] == [
        ("cuda0", ONE),
        ("cuda1", 2 * ONE),
        ("cuda2", ONE),
    ]


INVENTORY = machine(*gpus(1, 1, 1, 1))


def from_claim(
    wanted: int, *numbers: int, only: Iterable[str] = (), inventory: Inventory = INVENTORY
) -> list[str]:
    named = {"cuda": frozenset(DeviceId("cuda", name) for name in only)} if only else {}
    found = allocate_from_claim(
        allocation(*numbers),
        inventory,
        "a",
        ResourceSlots({"cuda.device": wanted * ONE}),
        AllocationPolicy(),
        named,
    )
    return [s.device_id.id for s in found.shares]


def test_devices_come_from_the_claim_alone() -> None:
    assert from_claim(2, 1, 3) == ["cuda1", "cuda3"]
    assert from_claim(1, 1, 3, only=["cuda3"]) == ["cuda3"]
    with pytest.raises(InsufficientResource):
        from_claim(3, 1, 3)
    with pytest.raises(InsufficientResource):
        from_claim(1, 1, 3, only=["cuda0"])


def test_claimed_device_can_be_used_drained_but_not_missing() -> None:
    (device,) = gpus(1)
    assert from_claim(1, 0, inventory=machine(replace(device, drained=True))) == ["cuda0"]
    with pytest.raises(InsufficientResource):
        from_claim(1, 0, inventory=machine(replace(device, gone=True)))


def test_all_of_a_claim_is_the_default_of_what_is_not_named() -> None:
    assert default_amounts(allocation(0, 1), frozenset()) == {"cuda.device": 2 * ONE}
    assert default_amounts(allocation(0, 1), frozenset({"cuda"})) == {}
    mine, others = split_slots(ResourceSlots({"cuda.device": ONE, "cpu": ONE}), frozenset({"cuda"}))
    assert (dict(mine), dict(others)) == ({"cuda.device": ONE}, {"cpu": ONE})


def test_an_observed_claim_takes_devices_in_any_state() -> None:
    states = {"drained": True, "gone": True, "awaited": "kubernetes", "busy": "used"}
    devices = [replace(device, **states) for device in gpus(1)]
    inventory = machine(*cores(1), *devices, memory())
    found = allocate_observed(
        inventory,
        Partition("a", tuple(device.device_id for device in devices), 0),
        ResourceSlots({"cuda.device": ONE}),
        AllocationPolicy(),
        {},
    )
    assert [s.device_id.id for s in found.shares] == ["cuda0"]


def test_several_slots_are_taken_from_a_claim_and_left_in_it() -> None:
    """A kernel of half a claim has half of what the claim has of each slot."""
    split = several_slots.node(several_slots.gpu(0))
    part = split.partitions["a"]
    claimed = several_slots.place(split, several_slots.asked(cuda_shares="0.1", cuda_mem="60g"))
    half = several_slots.asked(cuda_shares="0.05")
    taken = allocate_from_claim(claimed, split.inventory, "a", half, AllocationPolicy(), {})
    assert several_slots.charged(taken) == {"cuda0": ("0.05", "30g")}
    rest = subtract_allocations(claimed, [taken])
    assert several_slots.charged(rest) == {"cuda0": ("0.05", "30g")}
    ledger = Ledger().with_holding("k1", "a", taken).with_holding(ClaimRef("c1"), "a", rest)
    assert ledger.agent_limit_usage("a", "cuda") == 3 * ONE // 4, "it counts as the claim alone did"
    (device,) = split.inventory.by_name["cuda"]
    assert ledger.free(device, part, "cuda.mem") == 20 * 2**30
    assert default_amounts(claimed, frozenset()) == {"cuda.shares": ONE // 10}
    whole = ResourceSlots(default_amounts(claimed, frozenset()))
    everything = allocate_from_claim(claimed, split.inventory, "a", whole, AllocationPolicy(), {})
    assert subtract_allocations(claimed, [everything]) == Allocation()


def test_a_record_of_a_claim_has_every_slot() -> None:
    split = several_slots.node(several_slots.gpu(0))
    held = several_slots.place(split, several_slots.asked(cuda_mem="20g"))
    made = claim(allocation=held)
    read = decode("c1", encode(made, "n")).allocation
    assert [share.amounts for share in read.shares] == [share.amounts for share in held.shares]
