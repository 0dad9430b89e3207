"""Choosing devices from a claim, and for an observed one: the allocator over other inventories.

A claim is read as a small node: its shares are the devices, and each has the capacity that the
claim holds of it. So the rules for placement and for derived amounts are those of any create.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from agentd.core.allocation.allocator import allocate
from agentd.core.allocation.ledger import Allocation, Ledger, Share, complete_share
from agentd.core.allocation.policy import AllocationPolicy
from agentd.core.claim.claim import total_amounts
from agentd.core.devices import Device, DeviceId, Health, Inventory
from agentd.core.partition.split import Partition
from agentd.core.slots import CPU, MEM, ResourceSlots, device_name_of, format_amount
from agentd.errors import InsufficientResource


def claimed_names(claimed: Allocation) -> frozenset[str]:
    """Return the device names that a claim holds devices under."""
    return frozenset(share.device_id.name for share in claimed.shares)


def default_amounts(claimed: Allocation, named: frozenset[str]) -> dict[str, int]:
    """Return all that a claim holds of the device names that a request does not name.

    They are amounts of primary slots, from which the others follow.
    """
    unnamed = (share for share in claimed.shares if share.device_id.name not in named)
    return total_amounts(replace(share, secondary=()) for share in unnamed)


def allocate_from_claim(
    claimed: Allocation,
    inventory: Inventory,
    agent_id: str,
    slots: ResourceSlots,
    policy: AllocationPolicy,
    named_devices: Mapping[str, frozenset[DeviceId]],
) -> Allocation:
    """Choose from the devices of a claim; a drained one can be used, a missing one cannot.

    Raises:
        InsufficientResource: the claim holds less of a slot.
    """
    devices = [
        replace(
            _as_allocatable(device),
            capacity=share.amount,
            secondary=tuple(
                replace(offer, capacity=share.amount_of(offer.slot)) for offer in device.secondary
            ),
        )
        for share in claimed.shares
        if (device := inventory.by_id.get(share.device_id)) and device.slot == share.slot
    ]
    whole_shares = _shares_taken_whole(
        claimed, slots, {d.device_id for d in devices if d.is_usable}, named_devices
    )
    names = {share.device_id.name for share in whole_shares}
    slots = ResourceSlots(
        {s: amount for s, amount in slots.items() if device_name_of(s) not in names}
    )
    amounts = total_amounts(claimed.shares)
    partition = Partition(agent_id, tuple(d.device_id for d in devices), amounts.get(MEM, 0))
    claim_inventory = Inventory.of(inventory.slot_types.values(), devices)
    chosen = allocate(Ledger(), claim_inventory, partition, slots, policy, named_devices)
    by_id = inventory.by_id
    return Allocation(
        tuple(
            complete_share(share, by_id[share.device_id], inventory)
            for share in (*whole_shares, *chosen.shares)
        )
    )


def _shares_taken_whole(
    claimed: Allocation,
    slots: ResourceSlots,
    usable: Collection[DeviceId],
    named_devices: Mapping[str, frozenset[DeviceId]],
) -> list[Share]:
    """Return the shares of the device names that a request takes whole from a claim.

    They are taken as they are: the rests of a claim that kernels use need not be equal parts.
    """
    whole_shares: list[Share] = []
    for name in claimed_names(claimed):
        shares = claimed.shares_by_device_name(name)
        wanted = {slot: amount for slot, amount in slots.items() if device_name_of(slot) == name}
        device_ids = {share.device_id for share in shares}
        is_all = wanted == total_amounts(replace(share, secondary=()) for share in shares)
        if (
            is_all
            and device_ids <= set(usable)
            and device_ids <= named_devices.get(name, device_ids)
        ):
            whole_shares += shares
    return whole_shares


def allocate_observed(
    inventory: Inventory,
    partition: Partition,
    slots: ResourceSlots,
    policy: AllocationPolicy,
    named_devices: Mapping[str, frozenset[DeviceId]],
) -> Allocation:
    """Choose devices that an engine uses already, in any state and with any holder.

    Raises:
        InsufficientResource: the devices of the agent that the request names are too few.
    """
    devices = (
        replace(_as_allocatable(device), health=Health.HEALTHY, gone=False)
        for device in inventory.devices
    )
    healthy = Inventory.of(inventory.slot_types.values(), devices)
    return allocate(Ledger(), healthy, partition, slots, policy, named_devices)


def refuse_overcommitted(taken: Allocation, inventory: Inventory, ledger: Ledger) -> None:
    """Refuse what a kernel would take of an observed claim, if others hold a device of it, too.

    Raises:
        InsufficientResource: a device is held above its capacity, or whole for another slot.
    """
    for share in taken.shares:
        device = inventory.by_id[share.device_id]
        if ledger.excess(device) or ledger.whole_device_holders(device):
            amount = format_amount(share.amount, share.kind)
            reason = f"others hold device {device.device_id}; an admin can create with overcommit"
            amounts = f"requested {amount}, 0 free: {reason}"
            raise InsufficientResource(share.slot, amount, "0", (), amounts=amounts)


def with_claimed_usable(inventory: Inventory, claimed: Allocation) -> Inventory:
    """Return the inventory as creates from a claim see it: nothing withholds its devices."""
    claimed_ids = {share.device_id for share in claimed.shares}
    if not claimed_ids:
        return inventory
    devices = (_as_allocatable(d) if d.device_id in claimed_ids else d for d in inventory.devices)
    return Inventory.of(inventory.slot_types.values(), devices)


def _as_allocatable(device: Device) -> Device:
    """Return a device as if nothing withheld it from new kernels, unless it is a lost core."""
    withheld = device.withheld if device.device_id.name == CPU else ""
    return replace(device, drained=False, withheld=withheld, awaited="", busy="")


def split_slots(slots: ResourceSlots, names: frozenset[str]) -> tuple[ResourceSlots, ResourceSlots]:
    """Return the slots of devices that a claim holds, and the others."""
    if not names:
        return ResourceSlots(), slots
    claimed = {slot: amount for slot, amount in slots.items() if device_name_of(slot) in names}
    others = {slot: amount for slot, amount in slots.items() if slot not in claimed}
    return ResourceSlots(claimed), ResourceSlots(others)
