"""Limits: the most that an agent may hold of the node in shared mode, by device name.

An amount counts in the units of the device name's primary slots (half a GPU is 0.5). A kernel
counts on each device with the largest of its fractions of the device's slots, so that no limit is
passed by way of another slot. A percentage is of what the node has after the reservation.

Where every agent has a limit and they add up to no more than the node has, each agent's is
*guaranteed*: the others cannot hold so much that it could not have its own. A limit is checked when
devices are allocated. A limit that shrank does not touch running kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction

import msgspec

from agentd.core.conditions import Condition
from agentd.core.devices import Device, Inventory
from agentd.core.partition.rules import AgentRule, Amount, LimitRule
from agentd.core.slots import (
    MEM,
    ONE,
    AmountError,
    SlotKind,
    device_name_of,
    format_amount,
    is_divisible,
    parse_base_units,
    readable_amounts,
)
from agentd.errors import Problem


class Limit(msgspec.Struct, frozen=True):
    """The most that an agent may hold of one device name, in base units."""

    amount: int
    kind: SlotKind

    def __str__(self) -> str:
        return format_amount(self.amount, self.kind)


class DeviceNameCapacity(msgspec.Struct, frozen=True):
    """The capacity of one device name: its amount, kind and quantum."""

    name: str
    total: int
    present: int
    kind: SlotKind
    is_whole: bool
    devices: int
    is_mixed: bool

    @classmethod
    def of(cls, name: str, devices: Iterable[Device], inventory: Inventory) -> DeviceNameCapacity:
        """Return the capacity of these devices of one name."""
        devices = tuple(devices)
        types = [
            slot_type
            for slot, slot_type in inventory.slot_types.items()
            if device_name_of(slot) == name and slot_type.primary is None
        ]
        are_bytes = {slot.kind is SlotKind.BYTES for slot in types}
        is_bytes = are_bytes == {True}
        return cls(
            name=name,
            total=sum(device.capacity for device in devices),
            present=sum(_whole_quanta(device, inventory) for device in devices),
            kind=SlotKind.BYTES if is_bytes else SlotKind.COUNT,
            is_whole=not is_bytes and not any(is_divisible(slot) for slot in types),
            devices=len(devices),
            is_mixed=len(are_bytes) > 1,
        )


def _whole_quanta(device: Device, inventory: Inventory) -> int:
    """Return the allocatable capacity of a device, in whole quanta of its slot."""
    slot = inventory.slot_types.get(device.slot)
    return device.offered_capacities[0] // slot.quantum * slot.quantum if slot else 0


def resolve_limits(
    rules: Iterable[AgentRule], available: Mapping[str, DeviceNameCapacity], align: int
) -> tuple[dict[str, dict[str, Limit]], list[Problem]]:
    """Return each agent's limits by device name, and the problem of each impossible one.

    A name that is not `available` is left out: its plugin may still open.
    """
    limits: dict[str, dict[str, Limit]] = {}
    problems = []
    for index, rule in enumerate(rules):
        by_name = limits.setdefault(rule.agent_id, {})
        for name, limit in rule.limits.items():
            if name in available:
                try:
                    by_name[name] = Limit(
                        _limit_amount(limit, available[name], align), available[name].kind
                    )
                except AmountError as error:
                    problems.append(Problem(f"agents.{index}.resource.limits.{name}", str(error)))
    return limits, problems


def guaranteed_names(
    limits: Mapping[str, Mapping[str, Limit]], available: Mapping[str, DeviceNameCapacity]
) -> set[str]:
    """Return the device names whose limits can all be reached at once."""
    names = set()
    for name, capacity in available.items():
        amounts = [by_name[name].amount for by_name in limits.values() if name in by_name]
        if amounts and len(amounts) == len(limits) and sum(amounts) <= capacity.present:
            names.add(name)
    return names


def _limit_amount(limit: LimitRule, capacity: DeviceNameCapacity, align: int) -> int:
    if capacity.is_mixed:
        raise AmountError(
            f"slots of {capacity.name} are in units and in bytes; one limit has one unit"
        )
    if isinstance(limit, Amount):
        amount = parse_base_units(limit.text, capacity.kind)
        if capacity.is_whole and amount % ONE:
            raise AmountError(f"{limit.text} {capacity.name}: these devices are given whole")
        return amount
    exact = capacity.total * limit.percent / 100
    if capacity.name == MEM:
        return int(exact // align) * align
    unit = ONE if capacity.is_whole else 1
    if exact % unit:
        low = int(exact // unit) * unit
        nearest = " and ".join(_with_percent(n, capacity) for n in (low, low + unit))
        raise AmountError(
            f"{limit} of {format_amount(capacity.total, capacity.kind)} {capacity.name} is not a"
            f" whole number; the nearest are {nearest}"
        )
    return int(exact)


def _with_percent(amount: int, capacity: DeviceNameCapacity) -> str:
    percent = float(Fraction(100 * amount, capacity.total)) if capacity.total else 0.0
    return f"{format_amount(amount, capacity.kind)} ({percent:g}%)"


def limit_conditions(
    limits: Mapping[str, Mapping[str, Limit]], available: Mapping[str, DeviceNameCapacity]
) -> Iterator[Condition]:
    """Yield the conditions of the configured limits."""
    safe = guaranteed_names(limits, available)
    for name, capacity in available.items():
        by_agent = {agent: by_name[name] for agent, by_name in limits.items() if name in by_name}
        if not by_agent:
            continue
        if unlimited := [agent for agent in limits if agent not in by_agent]:
            reason = f"{name}: {', '.join(unlimited)} has no limit, so no part of it is guaranteed"
            yield Condition("host", reason, agents=tuple(unlimited))
            continue
        if name not in safe:
            total = sum(limit.amount for limit in by_agent.values())
            total_text, present = readable_amounts(capacity.kind, total, capacity.present)
            added = f"the limits add up to {total_text} of {present}"
            yield Condition("host", f"{name}: {added}, so none of them is guaranteed")
        elif not capacity.is_whole and capacity.devices > 1 and len(by_agent) > 1:
            yield Condition(
                "host",
                f"{name}: the amounts are guaranteed, not in one piece: what others leave"
                f" on {capacity.devices} devices may be in parts",
            )
