"""Why a request got what it got, device by device, for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from agentd.core.allocation.distribute import alike, fewest
from agentd.core.allocation.free_index import total
from agentd.core.allocation.ledger import Holder, Ledger, holder_text
from agentd.core.allocation.policy import Affinity, AllocationPolicy
from agentd.core.devices import Device, DeviceId, Health, Inventory
from agentd.core.partition.split import Partition
from agentd.core.slots import SlotType, device_name_of, format_amount, is_divisible
from agentd.errors import InsufficientResource

OTHER = "other"
"""What stands for a kernel of another agent to whoever is not to know of it."""


class Question(msgspec.Struct, frozen=True):
    """One slot of a request, and what there was when it was decided.

    `only` are the devices that the request named, if it did; `given` is what each device gave,
    in base units, empty for a refusal; `earlier` what the request got of the same device name.
    """

    ledger: Ledger
    inventory: Inventory
    partition: Partition
    slot_type: SlotType
    amount: int
    policy: AllocationPolicy
    only: frozenset[DeviceId] | None = None
    given: Mapping[DeviceId, int] = {}
    earlier: int = 0

    def room(self, device: Device) -> int:
        """Return what a device could give, in whole steps of the slot, in base units."""
        if device.slot != self.slot_type.name or not self.may_give(device):
            return 0
        free = self.ledger.free(device, self.partition)
        return free // self.slot_type.quantum * self.slot_type.quantum

    def may_give(self, device: Device) -> bool:
        """Tell whether the request leaves this device to choose from."""
        return self.only is None or device.device_id in self.only

    @property
    def potentials(self) -> list[int]:
        """What each device could give if all were there, healthy and unheld, in quanta."""
        offering = self.inventory.by_slot.get(self.slot_type.name, ())
        parts = (self.partition.potential(device) for device in offering if self.may_give(device))
        return [part // self.slot_type.quantum for part in parts]

    @property
    def is_too_unequal(self) -> bool:
        """Whether equal parts are asked for, and no number of devices could ever hold them."""
        if self.policy.allow_fragmentation or not is_divisible(self.slot_type):
            return False
        return not fewest(alike(self.potentials), self.amount // self.slot_type.quantum)

    @property
    def total(self) -> int:
        """What the devices could give if all were there, healthy and unheld, in base units."""
        return sum(self.potentials) * self.slot_type.quantum

    @property
    def never(self) -> str | None:
        """Why the request can never be granted, beyond its amounts; None if it can."""
        limit = self.partition.limits.get(self.name)
        is_over = limit is not None and self.earlier + self.amount > limit.amount
        if is_over or self.amount > self.total:
            return ""
        return "the devices are too unequal for equal parts" if self.is_too_unequal else None

    @property
    def name(self) -> str:
        """The device name of the slot."""
        return device_name_of(self.slot_type.name)

    @property
    def is_over_limit(self) -> bool:
        """Whether it is the agent's limit that the request does not keep."""
        left = self.ledger.within_limit(self.partition, self.name)
        return left is not None and self.earlier + self.amount > left

    @property
    def limit_line(self) -> str:
        """What the agent may hold, and what it holds."""
        held = self.written(self.ledger.held_of(self.partition.agent_id, self.name))
        agent, limit = self.partition.agent_id, self.partition.limits[self.name]
        return f"limit: {agent} may hold {limit} of {self.name}, and holds {held}"

    def written(self, amount: int) -> str:
        """Return an amount of the slot as it goes over the wire."""
        return format_amount(amount, self.slot_type.kind)


def refusal(question: Question) -> InsufficientResource:
    """Return the error that refuses a slot, with how every device was looked at."""
    offering = question.inventory.by_slot.get(question.slot_type.name, ())
    free = sum(question.room(device) for device in offering)
    left = question.ledger.within_limit(question.partition, question.name)
    if left is not None:
        quantum = question.slot_type.quantum
        free = min(free, max(0, left - question.earlier) // quantum * quantum)
    return InsufficientResource(
        question.slot_type.name,
        question.written(question.amount),
        question.written(free),
        explain(question),
        question.limit_line if question.is_over_limit else "",
        total=question.written(question.total),
        never=question.never,
    )


def explain(question: Question) -> list[dict[str, object]]:
    """Return a row for each device of the slot's device name.

    `free` and `given` are plain decimals; `considered` tells whether it could have given
    something, `reason` why it gave nothing, or not enough.
    """
    devices = question.inventory.by_name.get(question.name, ())
    parts = _equal_parts(question)
    return [
        _row(question, device, question.room(device), parts)
        for device in devices
        if not question.policy.is_discreet or device.device_id in question.partition.members
    ]


def _row(question: Question, device: Device, room: int, parts: _EqualParts) -> dict[str, object]:
    return {
        "device": device.device_id.id,
        "free": question.written(room),
        "considered": room > 0,
        "given": question.written(question.given.get(device.device_id, 0)),
        "reason": _cannot_give(question, device) or _did_not_do(question, device, room, parts),
    }


def _cannot_give(  # noqa: PLR0911 - one line for each reason, the gravest first
    question: Question, device: Device
) -> str:
    """Return why a device can give nothing at all; empty if it can."""
    ledger = question.ledger
    if not question.may_give(device):
        return "not among the devices that the request names"
    if device.device_id not in question.partition.members:
        return f"not in the partition of {question.partition.agent_id}"
    if device.gone:
        return f"gone: {device.reason}"
    if device.health is Health.UNHEALTHY:
        return f"unhealthy: {device.reason}"
    if device.withheld:
        return f"withheld: {device.withheld}"
    if device.drained:
        return "drained by an operator"
    if device.slot != question.slot_type.name:
        return f"offers {device.slot}"
    if holders := ledger.kept_back_by(device):
        held = ledger.holders(device.device_id)
        shown = [
            f"{_named(question, k)} holds {held[k].slot or 'an unreadable share'} of it"
            for k in holders
        ]
        return f"kept back: {', '.join(shown)}"
    strangers = ledger.strangers(device, question.partition)
    if question.partition.is_exclusive and strangers:
        return f"kept back: held by {_listed(question, strangers)} of another agent"
    return ""


def _named(question: Question, holder: Holder) -> str:
    """Return the name of a holder that the caller may see."""
    holding = question.ledger.holdings.get(holder)
    is_own = holding is not None and holding.agent_id == question.partition.agent_id
    return holder_text(holder) if is_own or not question.policy.is_discreet else OTHER


def _listed(question: Question, holders: Iterable[Holder]) -> str:
    named = (_named(question, holder).removeprefix("kernel ") for holder in holders)
    return ", ".join(dict.fromkeys(named))


def _did_not_do(question: Question, device: Device, room: int, parts: _EqualParts) -> str:
    """Return why a device that offers this slot gave nothing, or not enough; empty if it gave."""
    if device.device_id in question.given:
        return ""
    if not room:
        return _used_up(question, device)
    if question.given:
        return _not_chosen(question, device, room)
    if question.is_over_limit:
        return question.limit_line
    has = f"has {question.written(room)} of the {question.written(question.amount)}"
    if parts.are_impossible:
        return f"{has}; the devices are too unequal for equal parts{_rest(question, device)}"
    if part := parts.least:
        least = question.written(part)
        has = (
            f"has enough for an equal part of {least}, and too few others do"
            if room >= part
            else f"has {question.written(room)}, too little for an equal part of {least}"
        )
    return has + _rest(question, device)


def _used_up(question: Question, device: Device) -> str:
    holders = question.ledger.holders(device.device_id)
    if not holders:
        return "offers nothing"
    mine = _mine(question, device)
    if mine is None:
        return f"held by {_listed(question, holders)}"
    limit = question.written(question.partition.limit(device))
    return f"the agent's part of {limit} is held by {', '.join(map(str, mine))}"


def _rest(question: Question, device: Device) -> str:
    """Say what the device would have beyond its room, and who has that."""
    holders = question.ledger.holders(device.device_id)
    limit = question.partition.limit(device)
    mine = _mine(question, device)
    if mine is None:
        return f"; the rest is held by {_listed(question, holders)}" if holders else ""
    part = f"; the agent's part of it is {question.written(limit)}"
    return part + (f", the rest held by {', '.join(map(str, mine))}" if mine else "")


def _mine(question: Question, device: Device) -> list[Holder] | None:
    """Return the agent's own holders if its part, and not the device, is what is used up."""
    ledger, agent = question.ledger, question.partition.agent_id
    limit = question.partition.limit(device)
    left = device.capacity - ledger.used(device.device_id)
    if limit >= device.capacity or limit - ledger.used_by(agent, device.device_id) > left:
        return None
    return [k for k in ledger.holders(device.device_id) if ledger.holdings[k].agent_id == agent]


class _EqualParts(NamedTuple):
    """The equal parts of a refused request; both are about all devices, so they are found once."""

    are_impossible: bool = False
    least: int = 0


def _equal_parts(question: Question) -> _EqualParts:
    """Return the least equal part, if it is for want of equal parts that a slot is refused."""
    slot_type = question.slot_type
    if question.given or question.policy.allow_fragmentation or not is_divisible(slot_type):
        return _EqualParts()
    if question.is_too_unequal:
        return _EqualParts(are_impossible=True)
    index = question.ledger.index(question.inventory, question.partition, slot_type)
    if question.only is not None:
        index = index.only(question.only)
    wanted = question.amount // slot_type.quantum
    if total(index.buckets) < wanted or not (count := fewest(index.capacities, wanted)):
        return _EqualParts()
    return _EqualParts(least=wanted // count * slot_type.quantum)


def _not_chosen(question: Question, device: Device, room: int) -> str:
    nodes = {question.inventory.by_id[device_id].numa_node for device_id in question.given}
    is_near = device.numa_node is None or device.numa_node in nodes or None in nodes
    if question.policy.affinity is Affinity.PREFER_SINGLE_NODE and not is_near:
        return f"on NUMA node {device.numa_node}; not needed"
    if room < min(question.given.values()):
        return f"too small: has {question.written(room)}{_rest(question, device)}"
    return "not needed"
