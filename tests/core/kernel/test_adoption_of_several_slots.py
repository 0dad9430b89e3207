"""Charges of a kernel after a restart in which its devices offer other slots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agentd.core.allocation.explain import ExplainContext, explain
from agentd.core.allocation.ledger import Allocation, Ledger
from agentd.core.devices import Device, Inventory, SecondarySlot
from agentd.core.kernel.adoption import adopt, adopt_record, resolve_devices
from agentd.core.kernel.record import (
    RecordError,
    decode,
    decode_device_label,
    encode,
    encode_device_label,
)
from agentd.core.kernel.states import KernelState
from agentd.core.slots import ONE, SlotKind, SlotType
from agentd.rpc.rendering import agent_view, device_view, kernel_view
from core.kernels import KERNEL, found
from core.machines import GIB
from core.several_slots import (
    GPU_MEMORY,
    MIB,
    PLAIN,
    SHARES,
    TYPES,
    asked,
    charged,
    gpu,
    node,
    place,
)

VRAM = SlotType("cuda.vram", SlotKind.BYTES, MIB, primary="cuda.shares")
OTHER = SlotType("cuda.units", SlotKind.COUNT, ONE // 100)
BOTH = place(node(gpu(0)), asked(cuda_shares="0.1", cuda_mem="60g"))
SHARES_ALONE = place(node(gpu(0, None)), asked(cuda_shares="0.1"))


def renamed(device: Device) -> Device:
    memory = SecondarySlot(VRAM.name, VRAM.kind, 80 * GIB)
    return replace(device, secondary=(memory,))


def inventory_of(device: Device) -> Inventory:
    offered = set(device.slot_names)
    every = (*TYPES.values(), VRAM, OTHER)
    types = [t for t in every if not t.name.startswith("cuda") or t.name in offered]
    return replace(
        node(device).inventory, slot_types={slot_type.name: slot_type for slot_type in types}
    )


RESTARTS = {
    # the device now, the record, what is charged, its state, unknown slots, free shares
    "the same slots": (gpu(0), BOTH, {"cuda0": ("0.1", "60g")}, "ok", {}, "0.25"),
    "another primary slot": (
        gpu(0, slot="cuda.units"),
        BOTH,
        {"cuda0": ("0.1", "60g")},
        "held",
        {"cuda.shares": "0.1"},
        "0",
    ),
    "a slot that was switched on": (
        gpu(0), SHARES_ALONE, {"cuda0": ("0.1", "8g")}, "ok", {}, "0.9",
    ),
    "a slot that was switched off": (
        gpu(0, None), BOTH, {"cuda0": ("0.1", "60g")}, "ok", {"cuda.mem": str(60 * GIB)}, "0.9",
    ),
    "a slot that was renamed": (
        renamed(gpu(0)), BOTH, {"cuda0": ("0.1", "60g")}, "held", {"cuda.mem": str(60 * GIB)}, "0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RESTARTS)
def test_a_restart_charges_what_is_recorded(case: str) -> None:
    device, recorded, expected, state, unknown, free = RESTARTS[case]
    inventory = inventory_of(device)
    slots = recorded.totals()
    text = encode(
        replace(
            KERNEL,
            allocation=recorded,
            slots={slot: _written(each) for slot, each in slots.items()},
        ),
        "n",
    )
    item = found(record=text, device_label=encode_device_label(recorded))
    for adoption in (adopt(item, inventory), adopt_record("k1", text, "docker", inventory, 1.0)):
        assert not adoption.missing
        kernel = adoption.kernel
        assert charged(kernel.allocation) == expected
        split = replace(node(device), inventory=inventory)
        ledger = Ledger().with_holding("k1", "a", kernel.allocation)
        view = device_view(inventory.by_id[device.device_id], split, ledger)
        assert view["state"] == state
        assert view["holders"][0]["amounts"] == {
            slot: _written(each) for slot, each in kernel.allocation.totals().items()
        }
        running = replace(kernel, state=KernelState.RUNNING)
        shown = kernel_view(running, inventory)
        assert shown["slots"] == kernel.slots == {s: _written(each) for s, each in slots.items()}
        assert shown["unknown_slots"].items() >= unknown.items()
        primary = inventory.slot_types[device.slot]
        question = ExplainContext(
            ledger, inventory, split.partitions["a"], primary, {primary.name: ONE}, PLAIN
        )
        (row,) = explain(question)
        assert row["free"] == free


def _written(each) -> str:
    return str(each.amount) if each.kind is SlotKind.BYTES else f"{each.amount / ONE:g}"


def test_slot_that_one_device_lacks_now_is_not_charged() -> None:
    split = node(gpu(0, None), gpu(1))
    off, _ = resolve_devices(BOTH, split.inventory)
    kernel = replace(KERNEL, allocation=off, state=KernelState.RUNNING)
    shown = kernel_view(kernel, split.inventory)
    assert shown["allocation"] == {"cuda": {"cuda.shares": {"cuda0": "0.1"}}}
    assert shown["unknown_slots"]["cuda.mem"] == str(60 * GIB)
    use = agent_view("a", split, Ledger().with_holding("k1", "a", off))["slots"]
    assert use["cuda.mem"] == {"capacity": str(80 * GIB), "allocated": "0", "free": str(80 * GIB)}
    assert use["cuda.shares"]["allocated"] == "0.1"


def test_recorded_amounts_are_not_computed_again() -> None:
    smaller, _ = resolve_devices(BOTH, inventory_of(gpu(0, 40)))
    assert charged(smaller) == {"cuda0": ("0.1", "60g")}
    split = replace(node(gpu(0, 40)), inventory=inventory_of(gpu(0, 40)))
    ledger = Ledger().with_holding("k1", "a", smaller)
    view = device_view(split.inventory.by_name["cuda"][0], split, ledger)
    assert (view["state"], view["slots"]["cuda.mem"]["free"]) == ("overcommitted", "0")
    assert view["reason"] == "over-allocated by 20 GiB of cuda.mem"


def test_a_record_has_one_entry_for_each_device_and_slot() -> None:
    text = encode(replace(KERNEL, allocation=BOTH), "n")
    assert encode_device_label(BOTH) == (
        "cuda/cuda0/cuda.shares=0.1@GPU-cuda-0 cuda/cuda0/cuda.mem=64424509440B@GPU-cuda-0"
    )
    for read in (decode(text).allocation, decode_device_label(encode_device_label(BOTH))):
        assert resolve_devices(read, inventory_of(gpu(0)))[0] == BOTH
        assert encode_device_label(read) == encode_device_label(BOTH)


DAMAGED = {
    "a slot twice": "cuda/cuda0/cuda.shares=0.1@G cuda/cuda0/cuda.shares=0.2@G",
    "a second slot twice": (
        "cuda/cuda0/cuda.shares=0.1@G cuda/cuda0/cuda.mem=1B@G cuda/cuda0/cuda.mem=1B@G"
    ),
    "another id of the same device": "cuda/cuda0/cuda.shares=0.1@G cuda/cuda1/cuda.mem=1B@G",
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_statement_that_names_a_slot_twice_is_refused(case: str) -> None:
    with pytest.raises(RecordError, match="duplicate device"):
        decode_device_label(DAMAGED[case])


def test_a_lost_entry_never_charges_less_than_the_other() -> None:
    primary, secondary = encode_device_label(BOTH).split()
    inventory = inventory_of(gpu(0))
    text = encode(replace(KERNEL, allocation=BOTH), "n")
    adoption = adopt(found(record=text, device_label=primary), inventory)
    assert charged(adoption.kernel.allocation) == {"cuda0": ("0.1", "60g")}
    held = adopt(found(record=text, device_label=secondary), inventory).kernel.allocation
    ledger = Ledger().with_holding("k1", "a", held)
    assert ledger.whole_device_holders(inventory.by_name["cuda"][0]) == ["k1"]


AMOUNTS = st.integers(1, 100).map(lambda n: n * ONE // 100)


@given(st.lists(AMOUNTS, min_size=1, max_size=6), st.lists(st.booleans(), max_size=4))
def test_switching_a_slot_off_and_on_changes_nothing(amounts, offered) -> None:
    """Whatever came between, the kernels hold what their labels say once all is offered again."""
    split = node(*(gpu(n) for n in range(len(amounts))))
    part = {SHARES.name: 0}
    kernels = []
    for number, amount in enumerate(amounts):
        part[SHARES.name] = amount
        device = split.inventory.by_name["cuda"][number]
        kernels.append(
            place(split, asked(cuda_shares=f"{amount / ONE:.2f}"), only=[device.device_id.id])
        )
    for is_offered in (*offered, True):
        gib = 80 if is_offered else None
        inventory = node(*(gpu(n, gib) for n in range(len(amounts)))).inventory
        now = [
            resolve_devices(decode_device_label(encode_device_label(kernel)), inventory)[0]
            for kernel in kernels
        ]
        assert [encode_device_label(each) for each in now] == [
            encode_device_label(kernel) for kernel in kernels
        ]
    assert now == kernels
    assert GPU_MEMORY.name in Allocation(now[0].shares).totals()
