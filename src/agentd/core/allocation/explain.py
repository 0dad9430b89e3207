"""Explanations of allocations and refusals, device by device, for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import cached_property

import msgspec
from msgspec.structs import replace

from agentd.core.allocation.candidates import DeviceCandidate, devices_with_room, find_candidates
from agentd.core.allocation.distribute import fewest_devices, fewest_devices_together
from agentd.core.allocation.ledger import Holder, Ledger, holder_text
from agentd.core.allocation.policy import Affinity, AllocationPolicy
from agentd.core.devices import Device, DeviceId, Health, Inventory
from agentd.core.groups import join_first
from agentd.core.partition.split import Partition
from agentd.core.slots import (
    SlotName,
    SlotType,
    derived_amount,
    device_name_of,
    format_amount,
    is_divisible,
    readable_amount,
    readable_amounts,
)
from agentd.errors import InsufficientResource

OTHER = "other"
"""Stands for a kernel of another agent where the caller may not know of it."""


class ExplainContext(msgspec.Struct, frozen=True, dict=True):
    """One slot of a request, and the state of the node at its decision.

    `requested` has the named slots of the same devices with their amounts, the deciding one first.
    `slot_type` is the slot that is explained: one of these, or a derived one. `named_devices` are
    the devices that the request named, if it did. `granted` has the amount of the slot that each
    device gave, in base units; it is empty for a refusal. `earlier_usage` and `step_usage` are the
    amounts that earlier steps and this one count towards the agent's limit; `step_usage` is 0 if
    no devices were chosen.
    """

    ledger: Ledger
    inventory: Inventory
    partition: Partition
    slot_type: SlotType
    requested: Mapping[SlotName, int]
    policy: AllocationPolicy
    named_devices: frozenset[DeviceId] | None = None
    granted: Mapping[DeviceId, int] = {}
    earlier_usage: int = 0
    step_usage: int = 0

    @property
    def slot(self) -> SlotName:
        """The slot that is explained."""
        return self.slot_type.name

    @property
    def deciding_slot(self) -> SlotName:
        """The slot from which others are derived."""
        return next(iter(self.requested))

    @property
    def amount(self) -> int:
        """The amount that is asked for, or that was derived."""
        return self.requested.get(self.slot, sum(self.granted.values()))

    @property
    def has_several_slots(self) -> bool:
        """Whether several slots of the same devices are named."""
        return len(self.requested) > 1

    @property
    def quanta(self) -> int:
        """The amount that is asked for, in quanta."""
        return self.amount // self.slot_type.quantum

    @cached_property
    def by_slot(self) -> Mapping[SlotName, ExplainContext]:
        """The context of each named slot."""
        return {slot: self.for_slot(slot) for slot in self.requested}

    @cached_property
    def candidates(self) -> Mapping[DeviceId, DeviceCandidate]:
        """The devices that may give the slot, of those that the request leaves."""
        candidates = find_candidates(
            self.ledger,
            self.inventory,
            self.partition,
            self.slot,
            [*self.requested],
            self.named_devices,
        )
        return {candidate.device_id: candidate for candidate in candidates}

    def for_slot(self, slot: SlotName) -> ExplainContext:
        """Return the context of another slot."""
        return replace(self, slot_type=self.inventory.slot_types[slot])

    def room(self, device: Device) -> int:
        """Return what a device has room for, in whole steps of the slot, in base units."""
        candidate = self.candidates.get(device.device_id)
        return candidate.room * self.slot_type.quantum if candidate else 0

    def may_give(self, device: Device) -> bool:
        """Return whether the request leaves this device to choose from."""
        return self.named_devices is None or device.device_id in self.named_devices

    @property
    def potentials(self) -> dict[DeviceId, int]:
        """The quanta that each device could give if all were there, healthy and empty."""
        quanta_by_device = {
            device.device_id: self.partition.potential(device, self.slot) // self.slot_type.quantum
            for device in self.inventory.by_slot.get(self.slot, ())
            if self.may_give(device)
        }
        return {device_id: quanta for device_id, quanta in quanta_by_device.items() if quanta}

    @property
    def is_too_unequal(self) -> bool:
        """Whether equal parts are asked for, and no number of devices could ever hold them."""
        if self.has_several_slots:
            potentials = {slot: context.potentials for slot, context in self.by_slot.items()}
            return not fewest_devices_together(potentials, _requested_quanta(self.by_slot))
        return self.is_in_parts and not fewest_devices(
            sorted(self.potentials.values()), self.quanta
        )

    @property
    def is_in_parts(self) -> bool:
        """Whether one slot is given in equal parts."""
        return is_divisible(self.slot_type) and not self.policy.allow_fragmentation

    @cached_property
    def part_count(self) -> int:
        """On how many devices several named slots are given in equal parts; 0 if on none."""
        return _fewest_devices(self.by_slot)

    @cached_property
    def larger_parts(self) -> Mapping[SlotName, int]:
        """The larger equal part of each of several named slots; empty if there are none."""
        if not self.has_several_slots or not self.part_count:
            return {}
        return {
            slot: -(-context.quanta // self.part_count) * context.slot_type.quantum
            for slot, context in self.by_slot.items()
        }

    @cached_property
    def equal_part(self) -> int:
        """The equal part that too few devices can give; 0 if the reason is another."""
        if self.has_several_slots or not self.is_in_parts:
            return self.larger_parts.get(self.slot, 0)
        candidates = self.candidates.values()
        count = fewest_devices(sorted(candidate.capacity for candidate in candidates), self.quanta)
        is_enough = sum(candidate.room for candidate in candidates) >= self.quanta
        return self.quanta // count * self.slot_type.quantum if count and is_enough else 0

    @property
    def total(self) -> int:
        """The base units that the devices could give if all were there, healthy and empty."""
        return sum(self.potentials.values()) * self.slot_type.quantum

    @property
    def never_reason(self) -> str | None:
        """Why the request can never be granted, beyond its amounts; None if it can."""
        limit = self.partition.limits.get(self.name)
        is_over = limit is not None and self.earlier_usage + self.minimum_usage > limit.amount
        if is_over:
            return ""
        if any(context.amount > context.total for context in self.by_slot.values()):
            return self._excluded_text
        return "the devices are too unequal for equal parts" if self.is_too_unequal else None

    @property
    def _excluded_text(self) -> str:
        """Which devices of the slot the configuration excludes, as far as the caller may know."""
        offering = self.inventory.by_slot.get(self.slot, ())
        ids = [device.device_id.id for device in offering if device.is_excluded]
        if not ids or self.policy.is_discreet:
            return ""
        are = "is" if len(ids) == 1 else "are"
        return f"{join_first(ids)} {are} excluded in [plugins.{self.name}]"

    @property
    def name(self) -> str:
        """The device name of the slot."""
        return device_name_of(self.slot)

    @property
    def minimum_usage(self) -> int:
        """The least that the request can count towards the agent's limit."""
        return max(
            -(-context.amount // ratio) if (ratio := context.per_primary) else 0
            for context in self.by_slot.values()
        )

    @property
    def per_primary(self) -> Fraction:
        """The largest amount of the slot that goes with one base unit of its primary slot."""
        return ratio_to_primary(
            self.slot, self.inventory.by_slot.get(self.slot, ()), self.inventory
        )

    @cached_property
    def is_over_limit(self) -> bool:
        """Whether the request is refused for the agent's limit."""
        headroom = self.ledger.limit_headroom(self.partition, self.name)
        return (
            headroom is not None
            and self.earlier_usage + max(self.step_usage, self.minimum_usage) > headroom
        )

    @cached_property
    def limit_line(self) -> str:
        """The agent's limit and the amount that it holds, as a line of text."""
        agent, limit = self.partition.agent_id, self.partition.limits[self.name]
        allowed, held = readable_amounts(
            limit.kind, limit.amount, self.ledger.agent_limit_usage(agent, self.name)
        )
        return f"limit: {agent} may hold {allowed} of {self.name}, and holds {held}"

    def to_wire(self, amount: int) -> str:
        """Return an amount of the slot as it goes over the wire."""
        return format_amount(amount, self.slot_type.kind)

    def readable(self, *amounts: int) -> list[str]:
        """Return amounts of the slot for people."""
        return readable_amounts(self.slot_type.kind, *amounts)


def ratio_to_primary(slot: SlotName, devices: Iterable[Device], inventory: Inventory) -> Fraction:
    """Return the largest ratio of the usable capacities of a slot and its primary one; 0 if none.

    An agent that may hold so much of the primary slot may hold so many times that of the slot.
    """
    ratios = [Fraction(0)]
    for device in devices:
        measures = inventory.measures[device.device_id]
        if primary := measures[device.slot].usable:
            ratios.append(Fraction(measures[slot].usable, primary))
    return max(ratios)


def build_refusal(context: ExplainContext) -> InsufficientResource:
    """Return the error that refuses a step of a request, with a row for each device."""
    context = context.for_slot(_scarce_slot(context))
    offering = context.inventory.by_slot.get(context.slot, ())
    free = sum(context.room(device) for device in offering)
    headroom = context.ledger.limit_headroom(context.partition, context.name)
    if headroom is not None:
        quantum = context.slot_type.quantum
        under_limit = int(max(0, headroom - context.earlier_usage) * context.per_primary)
        free = min(free, under_limit // quantum * quantum)
    requested, available, total = context.readable(context.amount, free, context.total)
    return InsufficientResource(
        context.slot,
        context.to_wire(context.amount),
        context.to_wire(free),
        explain(context),
        context.limit_line if context.is_over_limit else "",
        amounts=f"requested {requested}, {available} free ({total} in total)",
        never=context.never_reason,
    )


def _scarce_slot(context: ExplainContext) -> SlotName:
    """Return the slot that is to blame: the deciding one, or the first other that is short."""
    if not context.has_several_slots:
        return context.deciding_slot
    considered: dict[SlotName, ExplainContext] = {}
    for slot, slot_context in context.by_slot.items():
        considered[slot] = slot_context
        count = context.part_count or _fewest_devices(considered)
        candidates = {
            name: slot_context.candidates.values() for name, slot_context in considered.items()
        }
        if (
            not count
            or len(devices_with_room(candidates, _requested_quanta(considered), count)) < count
        ):
            return slot
    return context.deciding_slot


def _fewest_devices(by_slot: Mapping[SlotName, ExplainContext]) -> int:
    """Return on how many devices these slots fit in equal parts, if all were empty."""
    capacities = {
        slot: {device_id: c.capacity for device_id, c in context.candidates.items()}
        for slot, context in by_slot.items()
    }
    return fewest_devices_together(capacities, _requested_quanta(by_slot))


def _requested_quanta(by_slot: Mapping[SlotName, ExplainContext]) -> dict[SlotName, int]:
    return {slot: context.quanta for slot, context in by_slot.items()}


def explain(context: ExplainContext) -> list[dict[str, object]]:
    """Return a row for each device of the slot's device name.

    `free` and `given` are plain decimals; `considered` says whether it had room for some of the
    slot, `reason` why it gave nothing, or not enough.
    """
    rows: list[dict[str, object]] = []
    for device in context.inventory.by_name.get(context.name, ()):
        if context.policy.is_discreet and device.device_id not in context.partition.members:
            continue
        room = context.room(device)
        row = {
            "device": device.device_id.id,
            "free": context.to_wire(room),
            "considered": room > 0,
            "given": context.to_wire(context.granted.get(device.device_id, 0)),
            "reason": _exclusion_reason(context, device)
            or _not_given_reason(context, device, room),
        }
        rows.append(row)
    return rows


def _suspension_reason(device: Device) -> str:
    """Return the reason why nothing is allocated from a present device; empty if it may be."""
    if reason := device.withheld_reason:
        return f"withheld: {reason}"
    if device.awaited:
        return f"withheld until engine {device.awaited} is ready"
    if device.busy:
        return f"busy: {device.busy}"
    return "drained by an operator" if device.drained else ""


def _exclusion_reason(  # noqa: PLR0911 - one line for each reason, the gravest first
    context: ExplainContext, device: Device
) -> str:
    """Return why a device can give nothing at all; empty if it can."""
    ledger = context.ledger
    if not context.may_give(device):
        return "not among the devices that the request or its claim names"
    if device.is_excluded:
        return f"withheld: {device.withheld_reason}"
    if device.device_id not in context.partition.members:
        return f"not in the partition of {context.partition.agent_id}"
    if device.gone:
        return f"gone: {device.reason}"
    if device.health is Health.UNHEALTHY:
        return f"unhealthy: {device.reason}"
    if suspension := _suspension_reason(device):
        return suspension
    if not {context.slot, *context.requested} <= set(device.slot_names):
        return f"offers {' and '.join(device.slot_names)}"
    if holders := ledger.whole_device_holders(device):
        shares = ledger.holders(device.device_id)
        texts = [
            f"{_visible_name(context, k)} holds"
            f" {' and '.join(shares[k].slot_names) or UNREADABLE} of it"
            for k in holders
        ]
        return f"held: {', '.join(texts)}"
    foreign = ledger.foreign_holders(device, context.partition)
    if context.partition.is_exclusive and foreign:
        return f"held by {_join_visible_names(context, foreign)} of another agent"
    return ""


UNREADABLE = "an unreadable share"


def _visible_name(context: ExplainContext, holder: Holder) -> str:
    """Return the name of a holder that the caller may see."""
    holding = context.ledger.holdings.get(holder)
    is_own = holding is not None and holding.agent_id == context.partition.agent_id
    return holder_text(holder) if is_own or not context.policy.is_discreet else OTHER


def _join_visible_names(context: ExplainContext, holders: Iterable[Holder]) -> str:
    names = (_visible_name(context, holder).removeprefix("kernel ") for holder in holders)
    return ", ".join(dict.fromkeys(names))


def _not_given_reason(  # noqa: PLR0911 - one line for each reason, the gravest first
    context: ExplainContext, device: Device, room: int
) -> str:
    """Return why a device that offers this slot gave nothing, or not enough; empty if it gave."""
    if device.device_id in context.granted:
        return ""
    if context.granted:
        if room:
            return _not_chosen_reason(context, device, room)
        return _used_up_reason(context, device)
    if shortage := _shortage_reason(context, device):
        return shortage
    if not room:
        return _used_up_reason(context, device)
    if context.is_over_limit:
        return context.limit_line
    has = "has {} of the {}".format(*context.readable(room, context.amount))
    if context.never_reason:
        return f"{has}; the devices are too unequal for equal parts{_rest_text(context, device)}"
    if part := context.equal_part:
        available, part_text = context.readable(room, part)
        has = (
            f"has enough for an equal part of {part_text}, and too few others do"
            if room >= part
            else f"has {available}, too little for an equal part of {part_text}"
        )
    return has + _rest_text(context, device)


def _shortage_reason(context: ExplainContext, device: Device) -> str:
    """Return the reason if a device has too little of another slot than the explained one.

    The other slot is derived, or named beside it. Empty if there is enough of each.
    """
    measures = context.inventory.measures[device.device_id]
    deciding = measures[context.deciding_slot]
    part = context.larger_parts.get(context.deciding_slot) or min(
        context.equal_part or context.requested[context.deciding_slot], deciding.usable
    )
    free_amounts = context.ledger.free_amounts(device, context.partition)
    if context.slot == context.deciding_slot and free_amounts[deciding.position] < part:
        return ""  # a device with one slot has this reason alone
    slot_types = context.inventory.slot_types
    for slot, measure in measures.items():
        kind, proportion = slot_types[slot].kind, ""
        if slot in context.requested:
            needed = context.larger_parts.get(slot, part if slot == context.deciding_slot else 0)
        else:
            needed = derived_amount(part, deciding.usable, measure.usable, measure.quantum)
            deciding_amount = readable_amount(part, slot_types[context.deciding_slot].kind)
            proportion = f" (in proportion to {context.deciding_slot} {deciding_amount})"
        free = free_amounts[measure.position] // measure.quantum * measure.quantum
        if free < needed:
            holders = context.ledger.holders(device.device_id)
            needed_text, free_text, total = readable_amounts(kind, needed, free, measure.usable)
            return (
                f"insufficient {slot}: requested {needed_text}{proportion}, {free_text} free"
                f" ({total} in total)"
                + (f"; held by {_join_visible_names(context, holders)}" if holders else "")
            )
    return ""


def _used_up_reason(context: ExplainContext, device: Device) -> str:
    holders = context.ledger.holders(device.device_id)
    if not holders:
        return "offers nothing"
    own = _own_holders(context, device)
    if own is None:
        return f"held by {_join_visible_names(context, holders)}"
    limit = readable_amount(context.partition.primary_limit(device), device.kind)
    return f"the agent's part of {limit} is held by {', '.join(map(str, own))}"


def _rest_text(context: ExplainContext, device: Device) -> str:
    """Return the text about the device's amount beyond its room, and its holders."""
    holders = context.ledger.holders(device.device_id)
    limit = context.partition.primary_limit(device)
    own = _own_holders(context, device)
    if own is None:
        return f"; the rest is held by {_join_visible_names(context, holders)}" if holders else ""
    part = f"; the agent's part of it is {readable_amount(limit, device.kind)}"
    return part + (f", the rest held by {', '.join(map(str, own))}" if own else "")


def _own_holders(context: ExplainContext, device: Device) -> list[Holder] | None:
    """Return the agent's own holders if its part, and not the device, is what is used up."""
    ledger, agent = context.ledger, context.partition.agent_id
    limit = context.partition.primary_limit(device)
    free = device.capacity - ledger.used(device.device_id)
    if limit >= device.capacity or limit - ledger.used_by(agent, device.device_id) > free:
        return None
    return [k for k in ledger.holders(device.device_id) if ledger.holdings[k].agent_id == agent]


def _not_chosen_reason(context: ExplainContext, device: Device, room: int) -> str:
    nodes = {context.inventory.by_id[device_id].numa_node for device_id in context.granted}
    is_near = device.numa_node is None or device.numa_node in nodes or None in nodes
    if context.policy.affinity is Affinity.PREFER_SINGLE_NODE and not is_near:
        return f"on NUMA node {device.numa_node}; not needed"
    if room < min(context.granted.values()):
        (room_text,) = context.readable(room)
        return f"too small: has {room_text}{_rest_text(context, device)}"
    return "not needed"
