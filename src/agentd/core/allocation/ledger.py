"""The ledger: the amounts that kernels and claims hold of devices, by slot; one for the node.

Immutable; the owner of the state keeps the newest. What is free follows from it and from
the devices as they are now. Neither is stored: a start builds the ledger from the records of
kernels and claims.

A kernel has one share of a device, with an amount of each slot of it. Each slot of a device has its
own sum, which no allocation lets pass the capacity. A share that lacks a slot of its device, or has
another primary slot, holds the device whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from agentd.core.allocation.derivation import compute_limit_excess
from agentd.core.devices import MEMORY, Device, DeviceId, Inventory, natural_key
from agentd.core.partition.split import Partition
from agentd.core.slots import SlotKind, SlotName, derived_amount, format_amount

UNREADABLE_SLOT: SlotName = ""
"""The slot of a share whose record cannot be read: it quarantines the whole device."""


class SlotAmount(NamedTuple):
    """An amount of one slot, in base units."""

    slot: SlotName
    kind: SlotKind
    amount: int


class Share(msgspec.Struct, frozen=True):
    """An amount of each slot of one device, which `stable_id` always names.

    `slot`, `kind` and `amount` (base units) are the device's primary slot. `secondary` are the
    others as they were allocated or recorded, also those that the device does not offer now.
    `limit_excess` is how much more than `amount` it counts towards an agent's limit.
    """

    device_id: DeviceId
    stable_id: str
    slot: SlotName
    kind: SlotKind
    amount: int
    secondary: tuple[SlotAmount, ...] = ()
    limit_excess: int = 0

    @property
    def amounts(self) -> tuple[SlotAmount, ...]:
        """The amount of each slot, the primary one first."""
        return SlotAmount(self.slot, self.kind, self.amount), *self.secondary

    @property
    def slot_names(self) -> tuple[SlotName, ...]:
        """The slots that it has an amount of, the primary one first."""
        return self.slot, *[other.slot for other in self.secondary]

    @property
    def limit_usage(self) -> int:
        """The base units of the primary slot that it counts towards an agent's limit."""
        return self.amount + self.limit_excess

    def amount_of(self, slot: SlotName) -> int:
        """Return the amount of one slot; 0 if it has none."""
        if slot == self.slot:
            return self.amount
        for other in self.secondary:
            if other.slot == slot:
                return other.amount
        return 0


def build_share(device: Device, inventory: Inventory, amounts: Mapping[SlotName, int]) -> Share:
    """Return a share with these amounts of a device, in base units by slot.

    Amounts of its other slots are derived from the first one. Those of slots that the device does
    not offer stay in the share.
    """
    measures = inventory.measures[device.device_id]
    deciding, amount = next(iter(amounts.items()))
    of = measures[deciding].usable
    slot_amounts = [
        SlotAmount(
            offer.slot,
            offer.kind,
            amounts[offer.slot]
            if offer.slot in amounts
            else derived_amount(amount, of, (to := measures[offer.slot]).usable, to.quantum),
        )
        for offer in device.slots
    ]
    usable = [measures[entry.slot].usable for entry in slot_amounts]
    excess = compute_limit_excess([entry.amount for entry in slot_amounts], usable)
    primary, *secondary = slot_amounts
    return Share(device.device_id, device.stable_id, *primary, tuple(secondary), excess)


def complete_share(share: Share, device: Device, inventory: Inventory) -> Share:
    """Return a recorded share with an amount of each slot that its device offers now.

    Recorded amounts stay as they are. A slot that the share lacks is derived from the primary one,
    unless the share has an amount of a slot that the device lacks: the slot may have been renamed,
    and the share holds the device whole.
    """
    if share.slot != device.slot:
        return replace(share, limit_excess=0)
    recorded = {entry.slot: entry.amount for entry in share.amounts}
    unknown = [entry for entry in share.secondary if entry.slot not in device.slot_names]
    if unknown and not recorded.keys() >= set(device.slot_names):
        return replace(share, limit_excess=0)
    current = build_share(device, inventory, recorded)
    secondary = sorted((*current.secondary, *unknown), key=lambda entry: natural_key(entry.slot))
    return replace(share, secondary=tuple(secondary), limit_excess=current.limit_excess)


def without_unoffered_slots(share: Share, device: Device, inventory: Inventory) -> Share:
    """Return a share without the slots that its device does not offer now: they are not charged.

    A remembered device may have slots that no plugin offers any more. A share that holds the device
    whole stays as it is.
    """
    offered = device.slot_names
    if device.slot in inventory.slot_types:
        offered = tuple(slot for slot in offered if slot in inventory.slot_types)
    if not _is_held_by(offered, share.slot_names):
        return share
    return replace(share, secondary=tuple(e for e in share.secondary if e.slot in offered))


class Allocation(msgspec.Struct, frozen=True):
    """The shares chosen for one holder, in request order."""

    shares: tuple[Share, ...] = ()

    def to_wire(self) -> dict[str, dict[SlotName, dict[str, str]]]:
        """Return amounts as plain decimals, by device name, slot and device id."""
        wire: dict[str, dict[SlotName, dict[str, str]]] = {}
        for share in self.shares:
            if share.slot == UNREADABLE_SLOT:
                continue
            by_slot = wire.setdefault(share.device_id.name, {})
            for slot, kind, amount in share.amounts:
                by_slot.setdefault(slot, {})[share.device_id.id] = format_amount(amount, kind)
        return wire

    def totals(self) -> dict[SlotName, SlotAmount]:
        """Return the amount of each slot over all devices."""
        sums: dict[SlotName, SlotAmount] = {}
        for share in self.shares:
            for slot, kind, amount in share.amounts:
                sum_so_far = sums[slot].amount if slot in sums else 0
                sums[slot] = SlotAmount(slot, kind, sum_so_far + amount)
        return sums

    def wire_totals(self) -> dict[SlotName, str]:
        """Return the plain decimals of each slot, by its name."""
        totals = sorted(self.totals().values())
        return {slot: format_amount(amount, kind) for slot, kind, amount in totals}

    def shares_by_device_name(self, name: str) -> tuple[Share, ...]:
        """Return the shares of devices under one device name."""
        return tuple(share for share in self.shares if share.device_id.name == name)


class ClaimRef(msgspec.Struct, frozen=True):
    """A claim as a holder of devices."""

    claim_id: str

    def __str__(self) -> str:
        return f"claim {self.claim_id}"


Holder: TypeAlias = str | ClaimRef
"""A kernel, by its id, or a claim: the ids of both are separate name spaces."""


def holder_text(holder: Holder) -> str:
    """Return a holder as a message names it: its kind and its id."""
    return str(holder) if isinstance(holder, ClaimRef) else f"kernel {holder}"


class Holding(msgspec.Struct, frozen=True):
    """The devices of one holder, and its agent."""

    agent_id: str
    allocation: Allocation


class Ledger(msgspec.Struct, frozen=True):
    """The allocations of all holders; immutable, one for the node.

    `shares_by_device` has the same shares by device, for lookups about one device.
    """

    holdings: Mapping[Holder, Holding] = {}
    shares_by_device: Mapping[DeviceId, Mapping[Holder, Share]] = {}

    def with_holding(self, holder: Holder, agent_id: str, allocation: Allocation) -> Ledger:
        """Return a ledger in which the holder has exactly this allocation."""
        others = self.without(holder)
        held = dict(others.shares_by_device)
        for share in allocation.shares:
            held[share.device_id] = {**others.holders(share.device_id), holder: share}
        return Ledger({**others.holdings, holder: Holding(agent_id, allocation)}, held)

    def without(self, holder: Holder) -> Ledger:
        """Return a ledger in which the holder has nothing; the same one if it had nothing."""
        if holder not in self.holdings:
            return self
        holdings, held = dict(self.holdings), dict(self.shares_by_device)
        for share in holdings.pop(holder).allocation.shares:
            holders = dict(held.pop(share.device_id))
            del holders[holder]
            if holders:
                held[share.device_id] = holders
        return Ledger(holdings, held)

    def holders(self, device_id: DeviceId) -> Mapping[Holder, Share]:
        """Return the holders of a device with their shares."""
        return self.shares_by_device.get(device_id, {})

    def used(self, device_id: DeviceId, slot: SlotName | None = None) -> int:
        """Return how much of a slot of a device is held.

        Without a slot: of the primary slots of its holders, in their units.
        """
        shares = self.holders(device_id).values()
        return sum(share.amount if slot is None else share.amount_of(slot) for share in shares)

    def excess(self, device: Device) -> dict[SlotName, int]:
        """Return what is held of a device beyond its capacity, by slot, in base units."""
        beyond = {o.slot: self.used(device.device_id, o.slot) - o.capacity for o in device.slots}
        return {slot: amount for slot, amount in beyond.items() if amount > 0}

    def used_by(self, agent_id: str, device_id: DeviceId) -> int:
        """Return how much of a device one agent's holders have, of their primary slots."""
        holders = self.holders(device_id).items()
        return sum(s.amount for holder, s in holders if self.holdings[holder].agent_id == agent_id)

    def shares_of(self, agent_id: str, name: str) -> Iterator[Share]:
        """Yield the shares that an agent's holders have of a device name."""
        for holding in self.holdings.values():
            if holding.agent_id == agent_id:
                yield from holding.allocation.shares_by_device_name(name)

    def agent_limit_usage(self, agent_id: str, name: str) -> int:
        """Return what an agent's holders have of a device name, as it counts towards a limit."""
        return sum(share.limit_usage for share in self.shares_of(agent_id, name))

    def limit_headroom(self, partition: Partition, name: str) -> int | None:
        """Return how much more of a device name an agent may hold; None without a limit."""
        if (limit := partition.limits.get(name)) is None:
            return None
        return max(0, limit.amount - self.agent_limit_usage(partition.agent_id, name))

    def whole_device_holders(self, device: Device) -> list[Holder]:
        """Return the holders of the whole device: their slots are not those that it offers now."""
        names = device.slot_names
        holders = self.holders(device.device_id).items()
        return [holder for holder, share in holders if not _is_held_by(names, share.slot_names)]

    def foreign_holders(self, device: Device, partition: Partition) -> list[Holder]:
        """Return holders of other agents that have something of a device, memory apart."""
        if device.device_id == MEMORY:
            return []
        agent_id, holdings = partition.agent_id, self.holdings
        return [h for h in self.holders(device.device_id) if holdings[h].agent_id != agent_id]

    def free(self, device: Device, partition: Partition, slot: SlotName | None = None) -> int:
        """Return what is free for an agent of a slot of this device, in base units.

        Without a slot: of its primary one. The device may have room for less, if another slot is
        used up.
        """
        names = device.slot_names
        if slot is not None and slot not in names:
            return 0
        return self.free_amounts(device, partition)[0 if slot is None else names.index(slot)]

    def free_amounts(self, device: Device, partition: Partition) -> tuple[int, ...]:
        """Return what is free for an agent of each slot of this device, the primary one first."""
        limits, names = partition.slot_limits(device), device.slot_names
        if not device.is_usable or not limits[0]:
            return (0,) * len(limits)
        is_memory = device.device_id == MEMORY
        is_exclusive = partition.is_exclusive and not is_memory
        free_amounts: Iterable[int] = limits
        for holder, share in self.holders(device.device_id).items():
            is_foreign = is_exclusive and self.holdings[holder].agent_id != partition.agent_id
            if is_foreign or not _is_held_by(names, share.slot_names):
                return (0,) * len(limits)
            free_amounts = [
                free - share.amount_of(slot) for slot, free in zip(names, free_amounts, strict=True)
            ]
        if is_memory:
            own_amount = self.used_by(partition.agent_id, MEMORY)
            free_amounts = [min(device.capacity - self.used(MEMORY), limits[0] - own_amount)]
        return tuple([max(0, amount) for amount in free_amounts])


def _is_held_by(offered: tuple[SlotName, ...], slots: tuple[SlotName, ...]) -> bool:
    """Return whether a share of these slots holds a device by every slot that it offers."""
    return offered == slots or (offered[0] == slots[0] and set(offered) <= set(slots))
