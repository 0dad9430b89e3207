"""The ledger: the amounts that kernels and claims hold of devices, by slot; one for the node.

Immutable; the owner of the state keeps the newest. What is free follows from it and from
the devices as they are now. Neither is stored: a start builds the ledger from the records of
kernels and claims.

A kernel has one share of a device, with an amount of each slot of it. Each slot of a device has its
own sum, which no allocation lets pass the capacity. A share that lacks a slot of its device, or has
another primary slot, holds the device whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import add, sub
from typing import NamedTuple, TypeAlias

from agentd.core.allocation.derivation import SlotMeasure, beyond_primary, room
from agentd.core.allocation.free_index import FreeIndex, siblings, sizes
from agentd.core.devices import MEMORY, Device, DeviceId, Inventory, natural_key
from agentd.core.partition.split import Partition
from agentd.core.slots import SlotKind, SlotName, SlotType, derived_amount, format_amount

UNREADABLE_SLOT: SlotName = ""
"""The slot of a share whose record cannot be read: it keeps back the whole device."""


class SlotAmount(NamedTuple):
    """An amount of one slot, in base units."""

    slot: SlotName
    kind: SlotKind
    amount: int


class Share(NamedTuple):
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
        if not self.secondary:
            return (self.slot,)
        return self.slot, *(other.slot for other in self.secondary)

    @property
    def counts(self) -> int:
        """The base units of the primary slot that it counts towards an agent's limit."""
        return self.amount + self.limit_excess

    def amount_of(self, slot: SlotName) -> int:
        """Return the amount of one slot; 0 if it has none."""
        return next((found.amount for found in self.amounts if found.slot == slot), 0)


def share_of(device: Device, inventory: Inventory, amounts: Mapping[SlotName, int]) -> Share:
    """Return a share with these amounts of a device, in base units by slot.

    Amounts of its other slots are derived from the first one. Those of slots that the device does
    not offer stay in the share.
    """
    measures = measured(device, inventory)
    deciding, amount = next(iter(amounts.items()))
    of = measures[deciding].usable
    found = [
        SlotAmount(
            offer.slot,
            offer.kind,
            amounts[offer.slot]
            if offer.slot in amounts
            else derived_amount(amount, of, (to := measures[offer.slot]).usable, to.quantum),
        )
        for offer in device.slots
    ]
    usable = [measures[each.slot].usable for each in found]
    excess = beyond_primary([each.amount for each in found], usable)
    primary, *secondary = found
    return Share(device.device_id, device.stable_id, *primary, tuple(secondary), excess)


def share_at(index: FreeIndex, position: int, quanta: int) -> Share:
    """Return a share of a device of an index: so much of its slot, and the others derived."""
    device, measures = index.devices[position], index.measures[position]
    own, amount = measures[0], quanta * index.quantum
    if not device.secondary:
        return Share(device.device_id, device.stable_id, device.slot, device.kind, amount)
    amounts, usable = [0] * len(measures), [0] * len(measures)
    for measure in measures:
        place, quantum, whole = measure
        usable[place] = whole
        amounts[place] = (
            amount if measure is own else derived_amount(amount, own.usable, whole, quantum)
        )
    secondary = tuple(
        [
            SlotAmount(offer.slot, offer.kind, each)
            for offer, each in zip(device.secondary, amounts[1:], strict=True)
        ]
    )
    excess = beyond_primary(amounts, usable)
    return Share(
        device.device_id,
        device.stable_id,
        device.slot,
        device.kind,
        amounts[0],
        secondary,
        excess,
    )


def completed(share: Share, device: Device, inventory: Inventory) -> Share:
    """Return a recorded share with an amount of each slot that its device offers now.

    Recorded amounts stay as they are. A slot that the share lacks is derived from the primary one,
    unless the share has an amount of a slot that the device lacks: the slot may have been renamed,
    and the share holds the device whole.
    """
    if share.slot != device.slot:
        return share._replace(limit_excess=0)
    if not (share.secondary or device.secondary):
        return share
    recorded = {each.slot: each.amount for each in share.amounts}
    unknown = [each for each in share.secondary if each.slot not in device.slot_names]
    if unknown and not recorded.keys() >= set(device.slot_names):
        return share._replace(limit_excess=0)
    now = share_of(device, inventory, recorded)
    secondary = sorted((*now.secondary, *unknown), key=lambda each: natural_key(each.slot))
    return share._replace(secondary=tuple(secondary), limit_excess=now.limit_excess)


def charged(share: Share, device: Device, inventory: Inventory) -> Share:
    """Return a share without the slots that its device does not offer now: they are not charged.

    A remembered device may have slots that no plugin offers any more. A share that holds the device
    whole stays as it is.
    """
    offered = device.slot_names
    if device.slot in inventory.slot_types:
        offered = tuple(slot for slot in offered if slot in inventory.slot_types)
    if (
        not share.secondary
        or share.slot_names == offered
        or not _is_held_by(offered, share.slot_names)
    ):
        return share
    return share._replace(secondary=tuple(e for e in share.secondary if e.slot in offered))


def measured(device: Device, inventory: Inventory) -> dict[SlotName, SlotMeasure]:
    """Return how each slot of a device is counted."""
    usable = inventory.usable(device)
    return {
        slot: SlotMeasure(place, inventory.quantum(slot), usable[place])
        for place, slot in enumerate(device.slot_names)
    }


class Allocation(NamedTuple):
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
                before = sums[slot].amount if slot in sums else 0
                sums[slot] = SlotAmount(slot, kind, before + amount)
        return sums

    def devices_of(self, name: str) -> tuple[Share, ...]:
        """Return the shares of devices under one device name."""
        return tuple(share for share in self.shares if share.device_id.name == name)


class ClaimHolder(NamedTuple):
    """A claim as a holder of devices."""

    claim_id: str

    def __str__(self) -> str:
        return f"claim {self.claim_id}"


Holder: TypeAlias = str | ClaimHolder
"""A kernel, by its id, or a claim: the ids of both are separate name spaces."""


def holder_text(holder: Holder) -> str:
    """Return a holder as a message names it: its kind and its id."""
    return str(holder) if isinstance(holder, ClaimHolder) else f"kernel {holder}"


class Holding(NamedTuple):
    """The devices of one holder, and its agent."""

    agent_id: str
    allocation: Allocation


class HeldAmount(NamedTuple):
    """The number of holders of the same slots, and their sum for each slot."""

    holders: int
    amounts: tuple[int, ...]


_Tallies: TypeAlias = Mapping[tuple[str, tuple[SlotName, ...]], HeldAmount]
"""Of one device, by agent and by the slots that shares have amounts of, the primary one first."""
_IndexKey: TypeAlias = tuple[Inventory, str, SlotName, tuple[SlotName, ...] | None]
_Indexes: TypeAlias = dict[_IndexKey, tuple[Partition, FreeIndex]]
"""Keyed by agent where partitions are exclusive (in shared mode all see the same), by slot, and by
the slots that are not derived from it (None: all)."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The amounts that holders have of devices; immutable, one for the node.

    Everything else follows from `holdings` and is kept beside it, and kept up with what a
    holder touches, so that no look-up has to go through holders or devices: `held` is the
    same by device, the tallies are its sums by agent and slots (`_by_agent` is what counts towards
    limits, by agent and device name), and the indexes that were
    asked for (see `agentd.core.allocation.free_index`) pass from each ledger to the next.
    """

    holdings: Mapping[Holder, Holding] = field(default_factory=dict)
    held: Mapping[DeviceId, Mapping[Holder, Share]] = field(default_factory=dict)
    _tallies: Mapping[DeviceId, _Tallies] = field(default_factory=dict, repr=False)
    _by_agent: Mapping[tuple[str, str], int] = field(default_factory=dict, repr=False)
    _indexes: _Indexes = field(default_factory=dict, repr=False, compare=False)
    _empty: _Indexes = field(default_factory=dict, repr=False, compare=False)
    """Indexes without their rooms, which depend on no holder: all ledgers have the same."""

    def with_held(self, holder: Holder, agent_id: str, allocation: Allocation) -> Ledger:
        """Return a ledger in which the holder has exactly this allocation."""
        if holder in self.holdings:
            return self.without(holder).with_held(holder, agent_id, allocation)
        holdings = {**self.holdings, holder: Holding(agent_id, allocation)}
        held, tallies = dict(self.held), dict(self._tallies)
        for share in allocation.shares:
            device_id = share.device_id
            held[device_id] = {**held.get(device_id, {}), holder: share}
            tallies[device_id] = _counted(tallies.get(device_id, {}), agent_id, share, 1)
        return self._next(holdings, held, tallies, Holding(agent_id, allocation), 1)

    def without(self, holder: Holder) -> Ledger:
        """Return a ledger in which the holder has nothing; the same one if it had nothing."""
        if holder not in self.holdings:
            return self
        holdings = dict(self.holdings)
        agent_id, allocation = holdings.pop(holder)
        held, tallies = dict(self.held), dict(self._tallies)
        for share in allocation.shares:
            device_id = share.device_id
            holders = dict(held.pop(device_id))
            del holders[holder]
            counted = _counted(tallies.pop(device_id), agent_id, share, -1)
            if holders:
                held[device_id], tallies[device_id] = holders, counted
        return self._next(holdings, held, tallies, Holding(agent_id, allocation), -1)

    def _next(
        self,
        holdings: Mapping[Holder, Holding],
        held: Mapping[DeviceId, Mapping[Holder, Share]],
        tallies: Mapping[DeviceId, _Tallies],
        touched: Holding,
        sign: int,
    ) -> Ledger:
        indexes: _Indexes = {}
        shares = touched.allocation.shares
        by_agent = dict(self._by_agent)
        for share in shares:
            of_agent = (touched.agent_id, share.device_id.name)
            by_agent[of_agent] = by_agent.get(of_agent, 0) + sign * share.counts
        by_agent = {of_agent: amount for of_agent, amount in by_agent.items() if amount}
        after = Ledger(holdings, held, tallies, by_agent, indexes, self._empty)
        device_ids = {share.device_id for share in shares}
        for key, (partition, index) in self._indexes.items():
            indexes[key] = (partition, _kept_up(index, partition, device_ids, self, after))
        return after

    def index(
        self,
        inventory: Inventory,
        partition: Partition,
        slot_type: SlotType,
        beside: tuple[SlotName, ...] | None = (),
    ) -> FreeIndex:
        """Return the devices that may give a slot to an agent, with their room now.

        The other slots of a device are derived from it but for those `beside` it; with None, none
        is. An index of several devices is kept; those of an older inventory are dropped.
        """
        agent = partition.agent_id if partition.is_exclusive else ""
        key = (inventory, agent, slot_type.name, beside)
        if (known := self._indexes.get(key)) is not None and known[0].members == partition.members:
            return known[1]
        index = self._without_rooms(key, partition, slot_type)
        index = index.with_rooms(
            [(at, 0, self.room(index, at, partition)) for at in range(len(index.devices))]
        )
        if len(index.devices) > 1:
            self._indexes[key] = (partition, index)
        return index

    def _without_rooms(
        self, key: _IndexKey, partition: Partition, slot_type: SlotType
    ) -> FreeIndex:
        if (known := self._empty.get(key)) is not None and _see_the_same(known[0], partition):
            return known[1]
        inventory, _, _, beside = key
        for indexes in (self._indexes, self._empty):
            for stale in [other for other in indexes if other[0] is not inventory]:
                del indexes[stale]
        devices = tuple(
            device
            for device in inventory.by_slot.get(slot_type.family, ())
            if device.usable and partition.limit(device)
        )
        measures = tuple(_measures(device, inventory, slot_type.name, beside) for device in devices)
        limits = (
            room(partition.limits_of(device), found) if found else 0
            for device, found in zip(devices, measures, strict=True)
        )
        index = FreeIndex(
            devices,
            {device.device_id: position for position, device in enumerate(devices)},
            sizes(limits),
            slot_type.quantum,
            {},
            siblings(devices),
            measures,
        )
        self._empty[key] = (partition, index)
        return index

    def holders(self, device_id: DeviceId) -> Mapping[Holder, Share]:
        """Return the holders of a device with their shares."""
        return self.held.get(device_id, {})

    def used(self, device_id: DeviceId, slot: SlotName | None = None) -> int:
        """Return how much of a slot of a device is held.

        Without a slot: of the primary slots of its holders, in their units.
        """
        tallies = self._tallies.get(device_id, {}).items()
        if slot is None:
            return sum(tally.amounts[0] for _, tally in tallies)
        return sum(
            tally.amounts[slots.index(slot)] for (_, slots), tally in tallies if slot in slots
        )

    def excess(self, device: Device) -> dict[SlotName, int]:
        """Return what is held of a device beyond its capacity, by slot, in base units."""
        held = {o.slot: self.used(device.device_id, o.slot) - o.capacity for o in device.slots}
        return {slot: amount for slot, amount in held.items() if amount > 0}

    def used_by(self, agent_id: str, device_id: DeviceId) -> int:
        """Return how much of a device one agent's holders have, of their primary slots."""
        tallies = self._tallies.get(device_id, {}).items()
        return sum(tally.amounts[0] for (agent, _), tally in tallies if agent == agent_id)

    def held_of(self, agent_id: str, name: str) -> int:
        """Return what an agent's holders have of a device name, as it counts towards a limit."""
        return self._by_agent.get((agent_id, name), 0)

    def devices_held_by(self, agent_id: str, name: str) -> list[DeviceId]:
        """Return the devices of a name with a share held for an agent."""
        if (agent_id, name) not in self._by_agent:
            return []
        return [
            device_id
            for device_id, tallies in self._tallies.items()
            if device_id.name == name and any(agent == agent_id for agent, _ in tallies)
        ]

    def within_limit(self, partition: Partition, name: str) -> int | None:
        """Return how much more of a device name an agent may hold; None without a limit."""
        if (limit := partition.limits.get(name)) is None:
            return None
        return max(0, limit.amount - self.held_of(partition.agent_id, name))

    def kept_back_by(self, device: Device) -> list[Holder]:
        """Return the holders of this device whole: not by the slots that it offers now."""
        names = device.slot_names
        tallies = self._tallies.get(device.device_id, {})
        if all(_is_held_by(names, slots) for _, slots in tallies):
            return []
        holders = self.holders(device.device_id).items()
        return [holder for holder, share in holders if not _is_held_by(names, share.slot_names)]

    def strangers(self, device: Device, partition: Partition) -> list[Holder]:
        """Return holders of other agents that have something of a device, memory apart."""
        mine = partition.agent_id
        agents = {agent for agent, _ in self._tallies.get(device.device_id, {})}
        if device.device_id == MEMORY or agents <= {mine}:
            return []
        holders = self.holders(device.device_id)
        return [k for k in holders if self.holdings[k].agent_id != mine]

    def free(self, device: Device, partition: Partition, slot: SlotName | None = None) -> int:
        """Return what is free for an agent of a slot of this device, in base units.

        Without a slot: of its primary one. The device may have room for less, if another slot is
        used up.
        """
        names = device.slot_names
        if slot is not None and slot not in names:
            return 0
        return self.left(device, partition)[0 if slot is None else names.index(slot)]

    def left(self, device: Device, partition: Partition) -> tuple[int, ...]:
        """Return what is free for an agent of each slot of this device, the primary one first."""
        if not device.secondary:
            return (self._left_alone(device, partition),)
        limits = partition.limits_of(device)
        if not limits[0] or not device.usable:
            return (0,) * len(limits)
        tallies = self._tallies.get(device.device_id)
        if not tallies:
            return limits
        names = device.slot_names
        used: tuple[int, ...] = ()
        for (agent, slots), (_, amounts) in tallies.items():
            held = amounts
            if slots != names:
                if not _is_held_by(names, slots):
                    return (0,) * len(names)
                held = tuple([amounts[slots.index(name)] for name in names])
            if partition.is_exclusive and agent != partition.agent_id:
                return (0,) * len(names)
            used = tuple(map(add, used, held)) if used else held
        return tuple(
            [limit - held if limit > held else 0 for limit, held in zip(limits, used, strict=True)]
        )

    def _left_alone(self, device: Device, partition: Partition) -> int:
        """Return what is free of a device that offers one slot."""
        if not device.usable or not (limit := partition.limit(device)):
            return 0
        tallies = self._tallies.get(device.device_id)
        if not tallies:
            return limit
        agent_id, slot = partition.agent_id, device.slot
        is_exclusive = partition.is_exclusive and device.device_id != MEMORY
        used = mine = 0
        for (agent, slots), (_, amounts) in tallies.items():
            if slots[0] != slot or (is_exclusive and agent != agent_id):
                return 0
            used += amounts[0]
            if agent == agent_id:
                mine += amounts[0]
        left = device.capacity - used
        if limit < device.capacity:
            left = min(left, limit - mine)
        return max(0, left)

    def room(self, index: FreeIndex, position: int, partition: Partition) -> int:
        """Return the quanta of an index's slot that one of its devices has room for."""
        device = index.devices[position]
        if not (measures := index.measures[position]):
            return 0
        if not device.secondary:
            return self._left_alone(device, partition) // index.quantum
        return room(self.left(device, partition), measures)


def _see_the_same(one: Partition, other: Partition) -> bool:
    return one.members == other.members and one.memory_bytes == other.memory_bytes


def _is_held_by(offered: tuple[SlotName, ...], slots: tuple[SlotName, ...]) -> bool:
    """Return whether a share of these slots holds a device by every slot that it offers."""
    return offered == slots or (offered[0] == slots[0] and set(offered) <= set(slots))


def _measures(
    device: Device, inventory: Inventory, slot: SlotName, beside: tuple[SlotName, ...] | None
) -> tuple[SlotMeasure, ...]:
    """Return the measures of a slot of a device and of those that are derived from it."""
    found = measured(device, inventory)
    own = found.pop(slot, None)
    if own is None:
        return ()
    if beside is None:
        return (own,)
    if not set(beside) <= found.keys():
        return ()
    return own, *(other for name, other in found.items() if name not in beside)


def _kept_up(
    index: FreeIndex,
    partition: Partition,
    device_ids: Iterable[DeviceId],
    before: Ledger,
    now: Ledger,
) -> FreeIndex:
    positions = [index.positions[d] for d in device_ids if d in index.positions]
    if not positions:
        return index
    return index.with_rooms(
        (at, before.room(index, at, partition), now.room(index, at, partition)) for at in positions
    )


def _counted(tallies: _Tallies, agent_id: str, share: Share, sign: int) -> _Tallies:
    slots: tuple[SlotName, ...] = (share.slot,)
    held: tuple[int, ...] = (share.amount,)
    if share.secondary:
        names, _, amounts = zip(*share.secondary, strict=True)
        slots, held = slots + names, held + amounts
    key = (agent_id, slots)
    if (before := tallies.get(key)) is None:
        return {**tallies, key: HeldAmount(1, held)}
    count = before.holders + sign
    if not count:
        return {other: tally for other, tally in tallies.items() if other != key}
    summed = tuple(map(add if sign > 0 else sub, before.amounts, held))
    return {**tallies, key: HeldAmount(count, summed)}


def release(ledger: Ledger, holder: Holder) -> tuple[Ledger, bool]:
    """Return the ledger without a holder, and whether it held anything.

    Releasing twice, or what was never held, changes nothing.
    """
    return ledger.without(holder), holder in ledger.holdings
