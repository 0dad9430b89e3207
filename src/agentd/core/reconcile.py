"""Comparing the kernels agentd knows with those that are there.

The answer is a list of actions; nothing here stops, restarts or removes a kernel that
ever ran. What was created and never started belongs to a create that was cut short and
is removed. What cannot be read keeps back every device that it might hold.

`busy` kernels have an operation of this daemon under way, which knows better; they are
left out. A kernel whose create has an unknown outcome counts as absent only
when its grace has passed (`expired`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias

from agentd.core.devices import MEMORY, Device, DeviceId, Inventory
from agentd.core.kernel import ENDED, PRESENT, STARTING, Ending, Kernel, KernelState, Port
from agentd.core.ledger import UNREADABLE_SLOT, Allocation, Share
from agentd.core.record import (
    NewerRecordError,
    Record,
    RecordedShare,
    RecordError,
    decode,
    read_statement,
)
from agentd.core.slots import CPU, MEM, ONE, SlotKind, format_amount


class FoundState(StrEnum):
    """What a runtime says of a kernel, in words that all runtimes share."""

    CREATED = "created"
    RUNNING = "running"
    PAUSED = "paused"
    EXITED = "exited"


@dataclass(frozen=True, slots=True)
class FoundKernel:
    """A kernel of this node as a runtime found it.

    `cores`, `memory_bytes` and `ports` are what the runtime holds it to, where it can tell;
    they matter only if `record` cannot be read. One that `is_partial` was only listed, and
    its times and ending are not known.
    """

    kernel_id: str
    agent_id: str
    runtime: str
    handle: str
    state: FoundState
    record: str
    statement: str
    started_at: float | None = None
    ending: Ending = field(default_factory=Ending)
    cores: tuple[str, ...] | None = None
    memory_bytes: int | None = None
    ports: tuple[Port, ...] = ()
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class Adopt:
    """Take this kernel as it is described, new or changed; `missing` devices join as gone."""

    kernel: Kernel
    missing: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True)
class RemoveNeverRan:
    """Remove what was created and never started."""

    found: FoundKernel


@dataclass(frozen=True, slots=True)
class MarkLost:
    """It ran, and a complete list is without it."""

    kernel_id: str


@dataclass(frozen=True, slots=True)
class DropUnborn:
    """Its create had an unknown outcome, and is now known to have left nothing."""

    kernel_id: str


Action: TypeAlias = Adopt | RemoveNeverRan | MarkLost | DropUnborn


def reconcile(
    known: Mapping[str, Kernel],
    found: Iterable[FoundKernel],
    inventory: Inventory,
    *,
    busy: Collection[str] = (),
    expired: Collection[str] = (),
) -> list[Action]:
    """Return what to do about every difference between `known` and a complete list."""
    by_id = {item.kernel_id: item for item in found}
    actions: list[Action] = []
    for kernel_id, item in by_id.items():
        if kernel_id in busy:
            continue
        before = known.get(kernel_id)
        shown = as_seen_before(before, item) if before else item
        if shown.state is FoundState.CREATED:
            actions.append(RemoveNeverRan(shown))
        elif action := _difference(before, shown, inventory):
            actions.append(action)
            for device in action.missing:
                inventory = inventory.with_device(device)
    for kernel_id, kernel in known.items():
        if kernel_id in by_id or kernel_id in busy:
            continue
        if kernel.state in PRESENT:
            actions.append(MarkLost(kernel_id))
        elif kernel.state in STARTING and kernel_id in expired:
            actions.append(DropUnborn(kernel_id))
    return actions


def as_seen_before(before: Kernel, item: FoundKernel) -> FoundKernel:
    """Return what was found; a kernel that was seen to run did, whatever is left of its traces."""
    is_same = before.state in PRESENT and item.handle in ("", before.handle)
    if item.state is not FoundState.CREATED or not is_same:
        return item
    ending = Ending(reason="it has ended, and what it left is damaged")
    handle, started_at = before.handle or "", before.started_at
    return replace(
        item, state=FoundState.EXITED, handle=handle, started_at=started_at, ending=ending
    )


def stopped(before: Kernel, item: FoundKernel | None, inventory: Inventory) -> Kernel:
    """Return a kernel after a stop, from what was found of it then."""
    if item is None:
        return before.moved_to(KernelState.LOST, reason="removed from outside as it was stopped")
    seen = as_seen_before(before, item)
    return before.moved_to(adopted(seen, inventory).kernel.state, ending=seen.ending)


def _difference(before: Kernel | None, item: FoundKernel, inventory: Inventory) -> Adopt | None:
    state = _STATES[item.state]
    if before is None or before.state in STARTING or before.handle != item.handle:
        return adopted(item, inventory)
    ending = item.ending if state in ENDED else Ending()
    if before.state is state or (before.state, state) in _SAME:
        is_same = (item.started_at, ending) == (before.started_at, before.ending)
        if is_same or item.is_partial:
            return None
        state = before.state
    return Adopt(before.moved_to(state, ending=ending, started_at=item.started_at))


_STATES = {
    FoundState.CREATED: KernelState.CREATING,
    FoundState.RUNNING: KernelState.RUNNING,
    FoundState.PAUSED: KernelState.PAUSED,
    FoundState.EXITED: KernelState.TERMINATED,
}
_SAME = {
    (KernelState.STOPPING, KernelState.RUNNING),
    (KernelState.UNREADABLE, KernelState.RUNNING),
    (KernelState.UNREADABLE, KernelState.PAUSED),
}


def adopted(item: FoundKernel, inventory: Inventory) -> Adopt:
    """Describe a found kernel by its record, else its statement, else by what it might hold."""
    base = Kernel(
        kernel_id=item.kernel_id,
        agent_id=item.agent_id,
        state=_STATES[item.state],
        spec_hash="",
        created_at=item.started_at or 0.0,
        runtime=item.runtime,
        handle=item.handle,
        started_at=item.started_at,
        ending=item.ending if item.state is FoundState.EXITED else Ending(),
        ports=item.ports,
    )
    try:
        record = _own_record(item)
    except RecordError as error:
        return _without_record(base, item, inventory, error)
    allocation, missing = located(record.shares, inventory)
    kernel = replace(
        base,
        agent_id=record.agent_id,
        spec_hash=record.spec_hash,
        created_at=record.created_at,
        slots=record.slots,
        allocation=allocation,
        not_enforced=record.not_enforced,
        ports=record.ports or item.ports,
    )
    return Adopt(kernel, missing)


def _own_record(item: FoundKernel) -> Record:
    record = decode(item.record)
    if record.kernel_id != item.kernel_id:
        raise RecordError(f"it is the record of {record.kernel_id}")
    return record


def _without_record(
    base: Kernel, item: FoundKernel, inventory: Inventory, why: RecordError
) -> Adopt:
    """Recover a kernel from the second statement; one that a newer agentd made is not ours to.

    There its devices are charged all the same: they are what the statement is for.
    """
    try:
        shares = read_statement(item.statement)
        if not shares:
            raise RecordError("the second statement is empty")
    except RecordError as error:
        reason = f"unreadable record ({why}) and devices ({error})"
        state = KernelState.UNREADABLE if base.holds else base.state
        held = Allocation(tuple(_might_hold(item, inventory)))
        return Adopt(replace(base, state=state, reason=reason, allocation=held))
    allocation, missing = located(shares, inventory)
    slots: dict[str, int] = {}
    kinds = {item.share.slot: item.share.kind for item in shares}
    for recorded in shares:
        slots[recorded.share.slot] = slots.get(recorded.share.slot, 0) + recorded.share.amount
    wire = {name: format_amount(amount, kinds[name]) for name, amount in slots.items()}
    kernel = replace(base, slots=wire, allocation=allocation)
    if isinstance(why, NewerRecordError):
        state = KernelState.UNREADABLE if base.holds else base.state
        reason = f"its record is of a newer agentd ({why}); its devices are charged"
        return Adopt(replace(kernel, state=state, reason=reason), missing)
    reason = f"unreadable record ({why}); recovered from the second statement of its devices"
    return Adopt(replace(kernel, reason=reason), missing)


def located(
    shares: Iterable[RecordedShare], inventory: Inventory
) -> tuple[Allocation, tuple[Device, ...]]:
    """Charge recorded shares to the physical devices, by stable id.

    Devices that the inventory does not know come back beside the allocation, as gone. One
    that was taken apart since holds back all of its parts.
    """
    placed: list[Share] = []
    missing: dict[str, Device] = {}
    for recorded in shares:
        share, stable_id = recorded.share, recorded.stable_id
        device = inventory.by_identity.get(stable_id) or missing.get(stable_id)
        if device is None:
            device = _gone(recorded, inventory)
            missing[stable_id] = device
        placed.append(share._replace(device_id=device.device_id))
        placed += (
            Share(part.device_id, UNREADABLE_SLOT, part.kind, 0)
            for part in inventory.parts_of(stable_id)
        )
    return Allocation(_one_for_each_device(placed)), tuple(missing.values())


def _one_for_each_device(shares: Iterable[Share]) -> tuple[Share, ...]:
    """Add up what a damaged record says of one device twice; of two slots, hold it whole."""
    merged: dict[DeviceId, Share] = {}
    for share in shares:
        other = merged.get(share.device_id)
        if other is not None and other.slot == share.slot:
            share = share._replace(amount=share.amount + other.amount)  # noqa: PLW2901 - the sum
        elif other is not None:
            share = share._replace(slot=UNREADABLE_SLOT, amount=0)  # noqa: PLW2901 - the whole
        merged[share.device_id] = share
    return tuple(merged.values())


def _gone(recorded: RecordedShare, inventory: Inventory) -> Device:
    share = recorded.share
    device_id = share.device_id
    if device_id in inventory.by_id:
        device_id = DeviceId(device_id.name, recorded.stable_id)
    return Device(
        device_id=device_id,
        stable_id=recorded.stable_id,
        slot=share.slot,
        kind=share.kind,
        capacity=share.amount,
        gone=True,
        reason="known only from a kernel that holds it",
    )


def kept_back(inventory: Inventory) -> Allocation:
    """Return what keeps every device back: the holdings of one of whom nothing is known."""
    return Allocation(
        tuple(Share(d.device_id, UNREADABLE_SLOT, d.kind, 0) for d in inventory.devices)
    )


def _might_hold(item: FoundKernel, inventory: Inventory) -> Iterable[Share]:
    for device in inventory.devices:
        if device.device_id == MEMORY:
            if item.memory_bytes:
                yield Share(MEMORY, MEM, SlotKind.BYTES, item.memory_bytes)
            else:
                yield Share(MEMORY, UNREADABLE_SLOT, SlotKind.BYTES, 0)
        elif device.device_id.name != CPU or item.cores is None:
            yield Share(device.device_id, UNREADABLE_SLOT, device.kind, 0)
        elif device.device_id.id in item.cores:
            yield Share(device.device_id, CPU, SlotKind.COUNT, ONE)
