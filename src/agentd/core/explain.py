"""Why a request got what it got, device by device, for people."""

from __future__ import annotations

from agentd.core.devices import Device, Health, Inventory
from agentd.core.ledger import Ledger
from agentd.core.partition import Partition
from agentd.core.policy import Policy
from agentd.core.slots import SlotType, device_name_of, format_amount
from agentd.errors import InsufficientResource


def refusal(
    ledger: Ledger,
    inventory: Inventory,
    partition: Partition,
    slot_type: SlotType,
    amount: int,
    policy: Policy,
) -> InsufficientResource:
    """Return the error that refuses `amount` of a slot, with how every device was looked at."""
    rows = explain(ledger, inventory, partition, slot_type, amount, policy)
    free = sum(
        ledger.free(device, partition) // slot_type.quantum * slot_type.quantum
        for device in inventory.by_slot.get(slot_type.name, ())
    )
    return InsufficientResource(
        slot_type.name,
        format_amount(amount, slot_type.kind),
        format_amount(free, slot_type.kind),
        rows,
    )


def explain(
    ledger: Ledger,
    inventory: Inventory,
    partition: Partition,
    slot_type: SlotType,
    amount: int,
    policy: Policy,
) -> list[dict[str, object]]:
    """Return, for each device of the slot's device name: what was free, and why it did not do."""
    rows = []
    for device in inventory.by_name.get(device_name_of(slot_type.name), ()):
        room = ledger.free(device, partition) // slot_type.quantum * slot_type.quantum
        offers = device.slot == slot_type.name
        considered = offers and device.device_id in partition.members and device.usable
        rows.append(
            {
                "device": device.device_id.id,
                "free": format_amount(room if offers else 0, slot_type.kind),
                "considered": considered and room > 0,
                "reason": _why_not(ledger, partition, device, slot_type, room, amount, policy),
            }
        )
    return rows


def _why_not(  # noqa: PLR0911 - one line for each reason, in the order that counts
    ledger: Ledger,
    partition: Partition,
    device: Device,
    slot_type: SlotType,
    room: int,
    amount: int,
    policy: Policy,
) -> str:
    if device.device_id not in partition.members:
        return f"not in the partition of {partition.agent_id}"
    if device.gone:
        return f"gone: {device.reason}"
    if device.health is Health.UNHEALTHY:
        return f"unhealthy: {device.reason}"
    if device.drained:
        return "drained by an operator"
    if device.slot != slot_type.name:
        return f"offers {device.slot}"
    if (holder := ledger.kept_back_by(device)) is not None:
        share = ledger.holders(device.device_id)[holder]
        return f"kept back: kernel {holder} holds {share.slot or 'an unreadable share'} of it"
    holders = ", ".join(ledger.holders(device.device_id))
    if not room:
        return f"held by {holders}" if holders else "offers nothing"
    if room >= amount and not policy.allow_fragmentation:
        return "too few devices like it for equal parts"
    return "too little" + (f"; the rest is held by {holders}" if holders else "")
