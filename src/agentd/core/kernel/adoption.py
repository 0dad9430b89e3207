"""The kernel that an adoption makes of an observed one, charged to the physical devices.

`reconcile` decides whether a kernel is adopted; the runtime's observer decides whether it belongs
to this node.

A kernel holds the devices of its record and those of its device label; where they differ,
its reason names both. A record never creates, renames, moves or frees a device, and a difference
never charges more of a slot than there is. A device for which the two name different primary
slots is held whole, under one of them. Where only one of the two can be read, that one counts;
where neither can, everything that the kernel might hold is charged.

Recorded amounts are never computed again. A slot that a device offers now and the record lacks is
derived and charged. An amount of a slot that the device no longer offers stays in the share, and is
charged again once the device offers it. Where both hold, the slot may have been renamed, and the
device is held whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from agentd.core.allocation.ledger import (
    UNREADABLE_SLOT,
    Allocation,
    Share,
    SlotAmount,
    complete_share,
)
from agentd.core.devices import MEMORY, Device, DeviceId, Inventory, SecondarySlot
from agentd.core.kernel.observation import ObservedKernel
from agentd.core.kernel.record import (
    DEVICE_LABEL,
    MissingRecordError,
    NewerRecordError,
    RecordError,
    decode,
    decode_device_label,
    encode_device_label,
)
from agentd.core.kernel.states import Ending, Kernel, KernelState, ObservedState
from agentd.core.slots import CPU, MEM, ONE, SlotKind


class KernelUpdate(msgspec.Struct, frozen=True):
    """An adopted kernel, and missing devices that are known only from its record."""

    kernel: Kernel
    missing: tuple[Device, ...] = ()


def adopt(
    item: ObservedKernel,
    inventory: Inventory,
    before: Kernel | None = None,
    *,
    now: float = 0.0,
) -> KernelUpdate:
    """Describe an observed kernel by its record and its device label, or what it might hold.

    `before` is the kernel as it was known, if it was. `now` (seconds since the epoch) is the time
    of adoption, which a kernel counts from whose record and start are not known.
    """
    state = KernelState.CREATING
    if before is not None and item.state is not ObservedState.CREATED:
        state = before.state
    facts: dict[str, Any] = {
        "state": state,
        "runtime": item.runtime,
        "handle": item.handle,
        "started_at": item.started_at,
        "ending": item.ending if item.state is ObservedState.EXITED else Ending(),
        "pid": item.pid,
        "unit": item.unit,
    }
    observed = Kernel(
        kernel_id=item.kernel_id,
        agent_id=item.agent_id,
        spec_hash="",
        created_at=before.created_at if before else item.started_at or now,
        ports=item.ports,
        claim_id=before.claim_id if before else None,
        keeps_claim=before is not None and before.keeps_claim,
        **facts,
    )
    try:
        recorded = _decode_record(item)
    except RecordError as error:
        return _adopt_without_record(observed, item, inventory, error)
    allocation, missing, difference = _merge_with_label(recorded, item, inventory)
    kernel = replace(
        recorded,
        allocation=allocation,
        ports=recorded.ports or item.ports,
        reason=difference or item.record_problem,
        **facts,
    )
    return KernelUpdate(_observe(kernel, item), missing)


def _merge_with_label(
    recorded: Kernel, item: ObservedKernel, inventory: Inventory
) -> tuple[Allocation, tuple[Device, ...], str]:
    """Return the devices of a record and of the device label, and the difference as text."""
    allocation, missing = resolve_devices(recorded.allocation, inventory)
    in_record = encode_device_label(recorded.allocation)
    if in_record == item.device_label:
        return allocation, missing, ""
    if not item.device_label and (not item.is_alive or DEVICE_LABEL in recorded.not_enforced):
        return allocation, missing, ""
    if not item.device_label:
        difference = f"its device label is missing; its record says {in_record}"
        return allocation, missing, difference
    try:
        label_allocation = decode_device_label(item.device_label)
    except RecordError as error:
        difference = f"its device label is unreadable ({error}); its record says {in_record}"
        return allocation, missing, difference
    for device in missing:
        inventory = inventory.with_device(device)
    label_devices, unknown = resolve_devices(label_allocation, inventory)
    recorded_words, label_words = (
        set(in_record.split()),
        set(encode_device_label(label_allocation).split()),
    )
    if recorded_words == label_words:
        return allocation, missing, ""
    difference = (
        f"its record says {_join_words(recorded_words - label_words)} and its device label"
        f" {_join_words(label_words - recorded_words)}; the devices of both are charged"
    )
    for device in unknown:
        inventory = inventory.with_device(device)
    held = _merge_by_device((*allocation.shares, *label_devices.shares), inventory, _larger_amount)
    return Allocation(held), (*missing, *unknown), difference


def _join_words(words: Iterable[str]) -> str:
    return ", ".join(sorted(words)) or "nothing else"


Merge: TypeAlias = Callable[[int, int, int], int]
"""From two amounts of a slot, and the most that there is of it, to one."""


def _larger_amount(first: int, second: int, capacity: int) -> int:
    """Return the larger amount, or all of the slot where that is more than there is."""
    return max(min(max(first, second), capacity), min(first, second))


def _sum_of_amounts(first: int, second: int, capacity: int) -> int:
    """Return the sum of the amounts of devices that are one now, or all where that is more."""
    return max(min(first + second, capacity), first, second)


def _merge_shares(first: Share, second: Share, device: Device, merge: Merge) -> Share:
    """Return one share of two of the same device, slot by slot."""
    offers = {offer.slot: offer for offer in device.slots}
    amounts: dict[str, SlotAmount] = {}
    for slot, kind, amount in (*first.amounts, *second.amounts):
        offer = offers.get(slot)
        total = amount
        if (earlier := amounts.get(slot)) is not None:
            capacity = offer.capacity if offer else earlier.amount + amount
            total = merge(earlier.amount, amount, capacity)
        amounts[slot] = SlotAmount(slot, offer.kind if offer else kind, total)
    primary, *secondary = amounts.values()
    return replace(first, kind=primary.kind, amount=primary.amount, secondary=tuple(secondary))


def _observe(kernel: Kernel, item: ObservedKernel) -> Kernel:
    if item.state is ObservedState.CREATED:
        return kernel
    return kernel.with_observation(item.state, degraded=changed_limits(kernel, item))


def changed_limits(kernel: Kernel, item: ObservedKernel) -> tuple[str, ...]:
    """Return the limits that differ from a kernel's allocation, as its runtime reports them.

    One that was given no cores, or no memory, has those of its agent, and is not compared.
    """
    if item.is_partial:
        return kernel.degraded
    cores: list[str] = []
    memory = 0
    for share in kernel.allocation.shares:
        if share.slot == CPU:
            cores.append(share.device_id.id)
        elif share.slot == MEM:
            memory += share.amount
    changes = []
    pinned = item.cores if cores and CPU not in kernel.not_enforced else None
    if pinned is not None and set(pinned) != set(cores):
        changes.append(f"cpu: runs on {', '.join(pinned)} instead of {', '.join(cores)}")
    if memory and item.memory_bytes not in (None, memory) and MEM not in kernel.not_enforced:
        limit = f"limited to {item.memory_bytes}" if item.memory_bytes else "not limited"
        changes.append(f"mem: {limit} instead of {memory} bytes")
    return tuple(changes)


def _decode_record(item: ObservedKernel) -> Kernel:
    if not item.record and item.record_problem:
        raise RecordError(item.record_problem)
    kernel = decode(item.record)
    if kernel.kernel_id != item.kernel_id:
        raise RecordError(f"it is the record of kernel {kernel.kernel_id}")
    return kernel


def _adopt_without_record(
    observed: Kernel, item: ObservedKernel, inventory: Inventory, record_error: RecordError
) -> KernelUpdate:
    """Recover a kernel from its device label.

    The kernel of a newer agentd is not recovered, but the devices of its label are charged.
    """
    is_missing = isinstance(record_error, MissingRecordError)
    record = "its record is missing" if is_missing else f"unreadable record ({record_error})"
    try:
        label_allocation = decode_device_label(item.device_label)
        if not label_allocation.shares:
            raise RecordError("the device label is empty")
    except RecordError as error:
        reason = f"{record}; its devices cannot be recovered: {error}"
        possible = Allocation(tuple(_possible_shares(item, inventory)))
        return KernelUpdate(
            _mark_unreadable(replace(observed, reason=reason, allocation=possible), item)
        )
    allocation, missing = resolve_devices(label_allocation, inventory)
    kernel = replace(observed, slots=label_allocation.wire_totals(), allocation=allocation)
    if isinstance(record_error, NewerRecordError):
        reason = f"its record is of a newer agentd ({record_error}); its devices are charged"
        return KernelUpdate(_mark_unreadable(replace(kernel, reason=reason), item), missing)
    reason = f"{record}; recovered from the device label"
    return KernelUpdate(_observe(replace(kernel, reason=reason), item), missing)


def _mark_unreadable(kernel: Kernel, item: ObservedKernel) -> Kernel:
    return (
        kernel.with_observation(ObservedState.UNREADABLE)
        if item.is_alive
        else _observe(kernel, item)
    )


def adopt_record(
    kernel_id: str, text: str, runtime: str, inventory: Inventory, now: float
) -> KernelUpdate:
    """Return the kernel of a saved record, before its runtime has listed its kernels.

    A kernel whose record cannot be read is `creating`, and quarantines every device.
    """
    try:
        recorded = decode(text)
    except RecordError as error:
        kernel = Kernel(
            kernel_id=kernel_id,
            agent_id="",
            state=KernelState.CREATING,
            spec_hash="",
            created_at=now,
            runtime=runtime,
            allocation=quarantine_allocation(inventory),
            reason="its record cannot be read" + (f": {error}" if text else ""),
        )
        return KernelUpdate(kernel)
    allocation, missing = resolve_devices(recorded.allocation, inventory)
    return KernelUpdate(replace(recorded, kernel_id=kernel_id, allocation=allocation), missing)


def resolve_devices(
    recorded: Allocation, inventory: Inventory
) -> tuple[Allocation, tuple[Device, ...]]:
    """Charge recorded shares to the physical devices, by stable id.

    Returns the allocation, and the devices in it that the inventory does not know, as `gone`. If
    the plugin now lists the parts of a recorded device, all parts are quarantined.
    """
    shares: list[Share] = []
    missing: dict[str, Device] = {}
    for share in recorded.shares:
        stable_id = share.stable_id
        device = inventory.by_identity.get(stable_id) or missing.get(stable_id)
        if device is None:
            device = _missing_device(share, inventory)
            missing[stable_id] = device
        shares.append(replace(share, device_id=device.device_id, stable_id=device.stable_id))
        shares += (_whole_share(part) for part in inventory.parts.get(stable_id, ()))
    for device in missing.values():
        inventory = inventory.with_device(device)
    held = _merge_by_device(shares, inventory, _sum_of_amounts)
    return Allocation(held), tuple(missing.values())


def _whole_share(device: Device) -> Share:
    return Share(device.device_id, device.stable_id, UNREADABLE_SLOT, device.kind, 0)


def _merge_by_device(
    shares: Iterable[Share], inventory: Inventory, merge: Merge
) -> tuple[Share, ...]:
    """Merge the shares of one device, each with an amount of every slot of it.

    The device is held whole where they are of two primary slots.
    """
    by_device: dict[DeviceId, Share] = {}
    for share in shares:
        device_id = share.device_id
        if (other := by_device.get(device_id)) is None:
            by_device[device_id] = share
        elif other.slot == share.slot:
            by_device[device_id] = _merge_shares(other, share, inventory.by_id[device_id], merge)
        else:
            by_device[device_id] = _choose_whole(other, share, inventory.by_id[device_id])
    return tuple(
        complete_share(share, inventory.by_id[device_id], inventory)
        for device_id, share in by_device.items()
    )


def _choose_whole(first: Share, second: Share, device: Device) -> Share:
    """Return the share by which a device is held whole, of two that are of different slots.

    That is all of what the device offers, if one of the two is. Else it is the share of another
    slot: as long as a kernel holds that, nothing of the device is given to others.
    """
    for share in (first, second):
        if share.slot == device.slot and share.amount >= device.capacity:
            return replace(share, amount=device.capacity or share.amount)
    for share in (first, second):
        if share.slot not in (UNREADABLE_SLOT, device.slot):
            return share
    return _whole_share(device)


def _missing_device(share: Share, inventory: Inventory) -> Device:
    """Return a missing device under an id that no plugin gave: its stable id."""
    device_id = DeviceId(share.device_id.name, share.stable_id)
    if device_id in inventory.by_id:
        device_id = DeviceId(device_id.name, f"missing-{share.stable_id}")
    return Device(
        device_id=device_id,
        stable_id=share.stable_id,
        slot=share.slot,
        kind=share.kind,
        capacity=share.amount,
        secondary=tuple(SecondarySlot(*other) for other in share.secondary),
        gone=True,
        reason="known only from a kernel that holds it",
        is_hearsay=True,
    )


def quarantine_allocation(inventory: Inventory) -> Allocation:
    """Return the allocation that quarantines every device, for an unreadable record."""
    return Allocation(tuple(_whole_share(device) for device in inventory.devices))


def _possible_shares(item: ObservedKernel, inventory: Inventory) -> Iterable[Share]:
    for device in inventory.devices:
        whole = _whole_share(device)
        if device.device_id == MEMORY:
            size = item.memory_bytes
            yield replace(whole, slot=MEM, amount=size) if size else whole
        elif device.device_id.name != CPU or item.cores is None:
            yield whole
        elif device.device_id.id in item.cores:
            yield replace(whole, slot=CPU, kind=SlotKind.COUNT, amount=ONE)
