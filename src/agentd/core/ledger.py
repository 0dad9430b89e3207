"""The ledger: who holds how much of which device, one for the node.

Immutable; whoever owns the state keeps the newest. What is free follows from it and from
the devices as they are now, and is never stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from agentd.core.devices import MEMORY, Device, DeviceId
from agentd.core.partition import Partition
from agentd.core.slots import SlotKind, SlotName, format_amount

UNREADABLE_SLOT: SlotName = ""
"""The slot of a share whose record cannot be read: it keeps back the whole device."""


class Share(NamedTuple):
    """So much (base units of `slot`) of one device."""

    device_id: DeviceId
    slot: SlotName
    kind: SlotKind
    amount: int


class Allocation(NamedTuple):
    """The shares chosen for one kernel, in request order."""

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


class Holding(NamedTuple):
    """What one kernel holds, for which agent."""

    agent_id: str
    allocation: Allocation


@dataclass(frozen=True, slots=True)
class Ledger:
    """Who holds how much of which device; immutable, one for the node.

    `held` and `held_by` follow from `holdings` and are kept beside it so that a look-up
    costs nothing.
    """

    holdings: Mapping[str, Holding] = field(default_factory=dict)
    held: Mapping[DeviceId, Mapping[str, Share]] = field(default_factory=dict)

    def with_held(self, kernel_id: str, agent_id: str, allocation: Allocation) -> Ledger:
        """Return a ledger in which the kernel holds exactly this allocation."""
        before = self.without(kernel_id) if kernel_id in self.holdings else self
        held = dict(before.held)
        for share in allocation.shares:
            holders = held.get(share.device_id, {})
            held[share.device_id] = {**holders, kernel_id: share}
        return Ledger({**before.holdings, kernel_id: Holding(agent_id, allocation)}, held)

    def without(self, kernel_id: str) -> Ledger:
        """Return a ledger in which the kernel holds nothing; the same one if it held nothing."""
        holding = self.holdings.get(kernel_id)
        if holding is None:
            return self
        held = dict(self.held)
        for share in holding.allocation.shares:
            holders = dict(held[share.device_id])
            del holders[kernel_id]
            if holders:
                held[share.device_id] = holders
            else:
                del held[share.device_id]
        holdings = dict(self.holdings)
        del holdings[kernel_id]
        return Ledger(holdings, held)

    def holders(self, device_id: DeviceId) -> Mapping[str, Share]:
        """Return the kernels that hold something of a device, and what."""
        return self.held.get(device_id, {})

    def used(self, device_id: DeviceId) -> int:
        """Return how much of a device is held, in its holders' units."""
        return sum(share.amount for share in self.holders(device_id).values())

    def used_by(self, agent_id: str, device_id: DeviceId) -> int:
        """Return how much of a device one agent's kernels hold."""
        holders = self.holders(device_id).items()
        return sum(s.amount for k, s in holders if self.holdings[k].agent_id == agent_id)

    def kept_back_by(self, device: Device) -> str | None:
        """Return a kernel that holds another slot of this device than it offers now."""
        holders = self.holders(device.device_id).items()
        return next((k for k, share in holders if share.slot != device.slot), None)

    def strangers(self, device: Device, partition: Partition) -> list[str]:
        """Return kernels of other agents that hold something of a device, memory apart."""
        if device.device_id == MEMORY:
            return []
        holders = self.holders(device.device_id)
        return [k for k in holders if self.holdings[k].agent_id != partition.agent_id]

    def free(self, device: Device, partition: Partition) -> int:
        """Return what could be given to an agent from this device now, in base units."""
        if not device.usable or not (limit := partition.limit(device)):
            return 0
        if device.device_id not in self.held:
            return limit
        if self.kept_back_by(device) is not None:
            return 0
        if partition.is_exclusive and self.strangers(device, partition):
            return 0
        left = device.capacity - self.used(device.device_id)
        if limit < device.capacity:
            left = min(left, limit - self.used_by(partition.agent_id, device.device_id))
        return max(0, left)


def release(ledger: Ledger, kernel_id: str) -> tuple[Ledger, bool]:
    """Return the ledger without the kernel, and whether it held anything.

    Releasing twice, or what was never held, changes nothing.
    """
    return ledger.without(kernel_id), kernel_id in ledger.holdings
