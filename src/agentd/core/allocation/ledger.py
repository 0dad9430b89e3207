"""The ledger: who holds how much of which device, one for the node.

Immutable; whoever owns the state keeps the newest. What is free follows from it and from
the devices as they are now, and is never stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from agentd.core.allocation.distribute import alike
from agentd.core.allocation.free_index import FreeIndex, siblings
from agentd.core.devices import MEMORY, Device, DeviceId, Inventory
from agentd.core.partition.split import Partition
from agentd.core.slots import SlotKind, SlotName, SlotType, format_amount

UNREADABLE_SLOT: SlotName = ""
"""The slot of a share whose record cannot be read: it keeps back the whole device."""


class Share(NamedTuple):
    """So much (base units of `slot`) of one device, which `stable_id` names for good."""

    device_id: DeviceId
    stable_id: str
    slot: SlotName
    kind: SlotKind
    amount: int


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
            amount = format_amount(share.amount, share.kind)
            by_slot.setdefault(share.slot, {})[share.device_id.id] = amount
        return wire

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
    """The number of holders of something, and what they hold together."""

    holders: int
    amount: int


_Tallies: TypeAlias = Mapping[tuple[str, SlotName], HeldAmount]
_Indexes: TypeAlias = dict[tuple[Inventory, str, SlotName], tuple[Partition, FreeIndex]]
"""Keyed by agent where partitions are exclusive; in shared mode all see the same."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Who holds how much of which device; immutable, one for the node.

    Everything else follows from `holdings` and is kept beside it, and kept up with what a
    holder touches, so that no look-up has to go through holders or devices: `held` is the
    same by device, the tallies are its sums by agent and slot (and `_by_agent` those by agent and
    device name), and the indexes that were
    asked for (see `agentd.core.allocation.free_index`) pass from each ledger to the next.
    """

    holdings: Mapping[Holder, Holding] = field(default_factory=dict)
    held: Mapping[DeviceId, Mapping[Holder, Share]] = field(default_factory=dict)
    _tallies: Mapping[DeviceId, _Tallies] = field(default_factory=dict, repr=False)
    _by_agent: Mapping[tuple[str, str], int] = field(default_factory=dict, repr=False)
    _indexes: _Indexes = field(default_factory=dict, repr=False, compare=False)

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
            by_agent[of_agent] = by_agent.get(of_agent, 0) + sign * share.amount
        by_agent = {of_agent: amount for of_agent, amount in by_agent.items() if amount}
        after = Ledger(holdings, held, tallies, by_agent, indexes)
        device_ids = {share.device_id for share in shares}
        for key, (partition, index) in self._indexes.items():
            indexes[key] = (partition, _kept_up(index, partition, device_ids, self, after))
        return after

    def index(self, inventory: Inventory, partition: Partition, slot_type: SlotType) -> FreeIndex:
        """Return the devices that may give a slot to an agent, with their room now.

        One of several devices is kept; an older inventory's are let go.
        """
        agent = partition.agent_id if partition.is_exclusive else ""
        key = (inventory, agent, slot_type.name)
        if (known := self._indexes.get(key)) is not None and known[0].members == partition.members:
            return known[1]
        for stale in [other for other in self._indexes if other[0] is not inventory]:
            del self._indexes[stale]
        devices = tuple(
            device
            for device in inventory.by_slot.get(slot_type.name, ())
            if device.usable and partition.limit(device)
        )
        limits = tuple(partition.limit(device) // slot_type.quantum for device in devices)
        index = FreeIndex(
            devices,
            {device.device_id: position for position, device in enumerate(devices)},
            limits,
            alike(limits),
            slot_type.quantum,
            {},
            siblings(devices),
        ).with_rooms(
            (position, 0, self.free(device, partition) // slot_type.quantum)
            for position, device in enumerate(devices)
        )
        if len(devices) > 1:
            self._indexes[key] = (partition, index)
        return index

    def holders(self, device_id: DeviceId) -> Mapping[Holder, Share]:
        """Return the holders of a device with their shares."""
        return self.held.get(device_id, {})

    def used(self, device_id: DeviceId) -> int:
        """Return how much of a device is held, in its holders' units."""
        return sum(tally.amount for tally in self._tallies.get(device_id, {}).values())

    def used_by(self, agent_id: str, device_id: DeviceId) -> int:
        """Return how much of a device one agent's holders have."""
        tallies = self._tallies.get(device_id, {}).items()
        return sum(tally.amount for (agent, _), tally in tallies if agent == agent_id)

    def held_of(self, agent_id: str, name: str) -> int:
        """Return how much of one device name's devices an agent's holders have together."""
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
        """Return the holders of another slot of this device than it offers now."""
        if all(slot == device.slot for _, slot in self._tallies.get(device.device_id, {})):
            return []
        holders = self.holders(device.device_id).items()
        return [holder for holder, share in holders if share.slot != device.slot]

    def strangers(self, device: Device, partition: Partition) -> list[Holder]:
        """Return holders of other agents that have something of a device, memory apart."""
        mine = partition.agent_id
        agents = {agent for agent, _ in self._tallies.get(device.device_id, {})}
        if device.device_id == MEMORY or agents <= {mine}:
            return []
        holders = self.holders(device.device_id)
        return [k for k in holders if self.holdings[k].agent_id != mine]

    def free(self, device: Device, partition: Partition) -> int:
        """Return what could be given to an agent from this device now, in base units."""
        if not device.usable or not (limit := partition.limit(device)):
            return 0
        if device.device_id not in self.held:
            return limit
        if self.kept_back_by(device):
            return 0
        if partition.is_exclusive and self.strangers(device, partition):
            return 0
        left = device.capacity - self.used(device.device_id)
        if limit < device.capacity:
            left = min(left, limit - self.used_by(partition.agent_id, device.device_id))
        return max(0, left)


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
    devices = [(at, index.devices[at]) for at in positions]
    return index.with_rooms(
        (
            at,
            before.free(device, partition) // index.quantum,
            now.free(device, partition) // index.quantum,
        )
        for at, device in devices
    )


def _counted(tallies: _Tallies, agent_id: str, share: Share, sign: int) -> _Tallies:
    key = (agent_id, share.slot)
    holders, amount = tallies.get(key, HeldAmount(0, 0))
    counted = {**tallies, key: HeldAmount(holders + sign, amount + sign * share.amount)}
    return {key: tally for key, tally in counted.items() if tally.holders}


def release(ledger: Ledger, holder: Holder) -> tuple[Ledger, bool]:
    """Return the ledger without a holder, and whether it held anything.

    Releasing twice, or what was never held, changes nothing.
    """
    return ledger.without(holder), holder in ledger.holdings
