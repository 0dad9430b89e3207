"""Dividing the node's devices among its agents.

Whole devices are divided, never amounts of them, so outside shared mode no device
has two owners; memory alone is one device that is divided by amount. Devices that
are gone keep their place, so that one lost GPU does not move the others.

`split` decides in this order: withhold what is reserved, deal the devices, and
derive the slots of each agent from its devices (`agent_slots`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from decimal import ROUND_HALF_EVEN, Decimal
from functools import cached_property
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from agentd.core.conditions import Condition
from agentd.core.device_conditions import about_name
from agentd.core.devices import MEMORY, Device, DeviceId, Inventory
from agentd.core.groups import group, join_first
from agentd.core.partition.auto_split import deal_devices, split_core_conditions, split_units
from agentd.core.partition.limits import (
    DeviceNameCapacity,
    Limit,
    guaranteed_names,
    limit_conditions,
    resolve_limits,
)
from agentd.core.partition.manual import AssignableDevices, Assignment, assign_manually
from agentd.core.partition.plugin_assignment import PluginAssignment
from agentd.core.partition.rules import AllocationMode, SplitRules
from agentd.core.places import in_places
from agentd.core.printable import printable_line
from agentd.core.slots import CPU, MEM, ResourceSlots, SlotName, device_name_of
from agentd.errors import ConfigRefused, Problem

DEFAULT_AGENT = "main"
_SCALE = Decimal("0.000001")


class Partition(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The devices one agent may use, and how much of the memory; compared by identity.

    It `is_exclusive` outside shared mode: no other agent is given a part of its devices. In shared
    mode `limits` are the most that the agent may hold, by device name.
    """

    agent_id: str
    devices: tuple[DeviceId, ...]
    memory_bytes: int
    is_exclusive: bool = False
    limits: Mapping[str, Limit] = {}

    @cached_property
    def members(self) -> frozenset[DeviceId]:
        """The devices, for look-ups."""
        return frozenset(self.devices)

    def primary_limit(self, device: Device) -> int:
        """Return the most that this agent may hold of `device`, in base units."""
        return self.slot_limits(device)[0]

    def slot_limits(self, device: Device) -> tuple[int, ...]:
        """Return the same for each slot of `device`, the primary one first."""
        if device.device_id not in self.members:
            return (0,) * len(device.slot_names)
        if device.device_id == MEMORY:
            return (min(device.offered_capacities[0], self.memory_bytes),)
        return device.offered_capacities

    def potential(self, device: Device, slot: SlotName) -> int:
        """Return the most of a slot of `device`, if the device were there and healthy."""
        if device.device_id not in self.members:
            return 0
        amount = device.capacity_of(slot)
        return min(amount, self.memory_bytes) if device.device_id == MEMORY else amount


class Split(msgspec.Struct, frozen=True, dict=True):
    """A partition of the node: its agents', and what no agent has."""

    mode: AllocationMode
    inventory: Inventory
    partitions: Mapping[str, Partition]
    reserved_cpu: tuple[str, ...]
    reserved_mem: int
    divided: frozenset[DeviceId]
    """The devices that were divided; others are new, or returned to another place."""
    unassigned_memory: int
    rule_conditions: tuple[Condition, ...]

    @cached_property
    def members(self) -> frozenset[DeviceId]:
        """The devices that at least one agent has."""
        return frozenset().union(*(part.members for part in self.partitions.values()))

    @cached_property
    def without_agent(self) -> Sequence[DeviceId]:
        """The devices that an agent could have, and none has."""
        taken = self.members | {DeviceId(CPU, core) for core in self.reserved_cpu}
        return [
            device.device_id
            for device in self.inventory.devices
            if device.device_id not in taken
            and not device.is_excluded
            and (device.device_id in self.divided or not device.gone)
        ]

    @property
    def unassigned(self) -> Mapping[str, tuple[str, ...]]:
        """The ids of the devices without an agent, by device name."""
        return {name: tuple(ids) for name, ids in group(self.without_agent).items()}

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The conditions of devices without an agent, and of the rules."""
        groups = group(((d.name, d in self.divided), d) for d in self.without_agent)
        reasons = (
            Condition(about_name(name), _without_agent_reason(devices, is_new=not was_divided))
            for (name, was_divided), devices in groups.items()
        )
        return (*reasons, *self.rule_conditions)

    def owners(self, device_id: DeviceId) -> list[str]:
        """Return the agents whose partition holds this device."""
        return [agent for agent, part in self.partitions.items() if device_id in part.members]

    def agent_slots(self, agent_id: str) -> ResourceSlots:
        """Return the amounts that an agent's healthy devices offer; never configured."""
        part = self.partitions[agent_id]
        return _sum_slots(self.inventory.devices, part.slot_limits)

    def node_slots(self) -> ResourceSlots:
        """Return what the whole node offers after the reservation."""
        reserved = {DeviceId(CPU, core) for core in self.reserved_cpu}
        return _sum_slots(
            (d for d in self.inventory.devices if d.device_id not in reserved),
            lambda device: device.offered_capacities,
        )

    @cached_property
    def guaranteed(self) -> frozenset[str]:
        """The device names whose limits every agent can reach with the devices of now."""
        limits = {agent: part.limits for agent, part in self.partitions.items()}
        members = next(iter(self.partitions.values())).members
        by_name = {
            name: DeviceNameCapacity.of(
                name, [d for d in devices if d.device_id in members], self.inventory
            )
            for name, devices in self.inventory.by_name.items()
        }
        return frozenset(guaranteed_names(limits, by_name))

    def scaling_factors(self, agent_id: str) -> dict[SlotName, Decimal]:
        """Return, for each known slot, the agent's part of the node's amount.

        Between 0 and 1, with six decimals at most; 1 with a single agent, 0 where the node
        has none.
        """
        owned, total = self.agent_slots(agent_id), self.node_slots()
        if len(self.partitions) == 1:
            owned = total
        return {
            slot: (Decimal(owned[slot]) / total[slot]).quantize(_SCALE, ROUND_HALF_EVEN).normalize()
            if total[slot]
            else Decimal(0)
            for slot in self.inventory.slot_types
        }

    def with_inventory(self, inventory: Inventory) -> Split:
        """Return the same assignment over devices whose health or presence changed.

        New devices belong to every agent in shared mode, and to a single agent in auto-split.
        Else they belong to no agent yet. An excluded device belongs to none any more.
        """
        now = replace(self, inventory=inventory)
        excluded = self.members & {d.device_id for d in inventory.devices if d.is_excluded}
        is_alone = self.mode is AllocationMode.AUTO_SPLIT and len(self.partitions) == 1
        joins = is_alone or self.mode is AllocationMode.SHARED
        new = [d for d in now.without_agent if joins and d not in self.divided]
        if not (excluded or new):
            return now
        partitions = {
            agent: replace(part, devices=(*(d for d in part.devices if d not in excluded), *new))
            for agent, part in self.partitions.items()
        }
        return replace(now, partitions=partitions)


def split_late_devices(
    before: Split,
    names: Collection[str],
    inventory: Inventory,
    rules: SplitRules,
    unlisted: Mapping[str, str] = MappingProxyType({}),
    dealings: Mapping[str, PluginAssignment | None] = MappingProxyType({}),
) -> Split:
    """Divide device names that came late; everything else stays where it is.

    `inventory` has the late devices, and the memory as `before` left it.

    Raises:
        ConfigRefused: the rules do not fit the devices.
    """
    memory = inventory.by_id[MEMORY]
    whole = replace(memory, capacity=memory.capacity + before.reserved_mem)
    fresh_split = split(inventory.with_device(whole), rules, unlisted, dealings)

    def merged(old: Iterable[DeviceId], new: Iterable[DeviceId]) -> tuple[DeviceId, ...]:
        unchanged = (device_id for device_id in old if device_id.name not in names)
        return (*unchanged, *(device_id for device_id in new if device_id.name in names))

    return replace(
        fresh_split,
        partitions={
            agent: replace(
                fresh_split.partitions[agent],
                devices=merged(part.devices, fresh_split.partitions[agent].devices),
            )
            for agent, part in before.partitions.items()
        },
        divided=frozenset(merged(before.divided, fresh_split.divided)),
    )


def _sum_slots(
    devices: Iterable[Device], limits: Callable[[Device], Iterable[int]]
) -> ResourceSlots:
    amounts: dict[SlotName, int] = {}
    for device in devices:
        for slot, amount in zip(device.slot_names, limits(device), strict=True):
            amounts[slot] = amounts.get(slot, 0) + amount
    return ResourceSlots(amounts)


def split(
    inventory: Inventory,
    rules: SplitRules,
    unlisted: Mapping[str, str] = MappingProxyType({}),
    dealings: Mapping[str, PluginAssignment | None] = MappingProxyType({}),
) -> Split:
    """Divide the node; `unlisted` holds device names whose plugin listed nothing, and why.

    `dealings` holds, by device name, how its plugin deals the devices in auto-split; None where
    it cannot be asked yet.

    The split's inventory has the reserved memory taken off its memory device. No agents
    in `rules` means one, `main`, that owns everything.

    Raises:
        ConfigRefused: the rules do not fit the devices; every reason is listed.
    """
    conditions: list[Condition] = []
    reserved, problems = _reserve_cores(inventory, rules)
    memory = inventory.by_id[MEMORY]
    memory_bytes = max(0, memory.capacity - rules.reserved_mem)
    inventory = inventory.with_device(replace(memory, capacity=memory_bytes))
    divisible = [d for d in inventory.devices if d.device_id not in (MEMORY, *reserved)]
    counted = in_places(device for device in divisible if not device.is_excluded)
    divided = frozenset(device.device_id for device in counted)
    pool = AssignableDevices(
        tuple(counted),
        memory_bytes,
        tuple(reserved),
        unlisted,
        frozenset(device_name_of(slot) for slot in inventory.slot_types),
        tuple(device for device in divisible if device.device_id not in divided),
    )
    if not rules.agents or rules.mode is AllocationMode.SHARED:
        agents = [rule.agent_id for rule in rules.agents] or [DEFAULT_AGENT]
        everything = [device.device_id for device in pool.devices]
        assignment = Assignment(
            dict.fromkeys(agents, everything), dict.fromkeys(agents, memory_bytes)
        )
    elif rules.mode is AllocationMode.AUTO_SPLIT:
        assignment = _split_automatically(pool, rules, dealings)
        conditions += _dealing_conditions(pool, rules, dealings)
    else:
        assignment, more_problems = assign_manually(pool, rules)
        problems += more_problems
    available = _limitable_by_name(pool, inventory)
    limits, more_problems = resolve_limits(rules.agents, available, rules.align)
    problems += [*more_problems, *_unknown_limit_problems(rules, pool)]
    if problems:
        raise ConfigRefused(problems)
    if rules.mode is AllocationMode.SHARED:
        conditions += limit_conditions(limits, available)
    else:
        limits = {}
    return _build_split(inventory, rules, pool, divided, assignment, limits, conditions)


def _limitable_by_name(
    pool: AssignableDevices, inventory: Inventory
) -> dict[str, DeviceNameCapacity]:
    """Return the capacity of each device name with known slots; other plugins may still open."""
    names = {**pool.by_name, MEM: [inventory.by_id[MEMORY]]}
    return {
        name: DeviceNameCapacity.of(name, devices, inventory)
        for name, devices in names.items()
        if name in pool.known_names
    }


def _unknown_limit_problems(rules: SplitRules, pool: AssignableDevices) -> Iterator[Problem]:
    known = {*pool.by_name, *pool.known_names, MEM}
    for index, rule in enumerate(rules.agents):
        for name in rule.limits:
            if name not in known and name not in pool.unlisted:
                available = ", ".join(sorted(known))
                location = f"agents.{index}.resource.limits.{printable_line(name)}"
                yield Problem(location, f"unknown device name {name!r}; available: {available}")


def _reserve_cores(inventory: Inventory, rules: SplitRules) -> tuple[list[DeviceId], list[Problem]]:
    problems = []
    cores = inventory.by_name.get(CPU, ())
    present = [d.device_id for d in cores if not d.gone]
    rule = rules.reserved_cpu
    if isinstance(rule, int):
        reserved = [d.device_id for d in cores][:rule]  # a missing one moves no other
    else:
        known = {name: d.device_id for d in cores for name in (d.device_id.id, d.stable_id)}
        named = {known[name] for name in rule if name in known}
        reserved = [d.device_id for d in cores if d.device_id in named]
        if unknown := [name for name in rule if name not in known]:
            available = ", ".join(device_id.id for device_id in present)
            reason = f"no core {', '.join(unknown)}; the node has {available}"
            problems.append(Problem("resource.reserved-cpu", reason))
    if not {d.device_id for d in cores} - {*reserved}:
        reason = f"leaves no core; the node has {len(present)}, reserve fewer"
        problems.append(Problem("resource.reserved-cpu", reason))
    total = inventory.by_id[MEMORY].capacity
    if rules.reserved_mem >= total:
        reason = f"{rules.reserved_mem} bytes leave no memory; the node has {total}"
        problems.append(Problem("resource.reserved-mem", reason))
    return reserved, problems


def _split_automatically(
    pool: AssignableDevices, rules: SplitRules, dealings: Mapping[str, PluginAssignment | None]
) -> Assignment:
    agents = [rule.agent_id for rule in rules.agents]
    dealt = deal_devices(pool.by_name, agents, rules.order, dealings)
    if len(agents) == 1:
        return Assignment(dealt, {agents[0]: pool.memory_bytes})
    units = split_units(pool.memory_bytes // rules.align, len(agents))
    sizes = {agent: unit * rules.align for agent, unit in zip(agents, units, strict=True)}
    return Assignment(dealt, sizes)


def _dealing_conditions(
    pool: AssignableDevices, rules: SplitRules, dealings: Mapping[str, PluginAssignment | None]
) -> Iterator[Condition]:
    if rules.uses_plugin_order and not dealings and not pool.unlisted:
        yield Condition(
            "host",
            'auto-split-order is "plugin", but no plugin of this node deals its devices;'
            ' they are dealt as with "id"',
        )
    for name, dealing in dealings.items():
        if dealing is None:
            reason = "its plugin is not ready to deal its devices, so no agent has them"
            yield Condition(about_name(name), f"{name}: {reason}")
        elif dealing.reason:
            reason = f"its plugin deals unequal numbers of devices: {dealing.reason}"
            yield Condition(about_name(name), f"{name}: {reason}", agents=tuple(dealing.devices))


def _build_split(
    inventory: Inventory,
    rules: SplitRules,
    pool: AssignableDevices,
    divided: frozenset[DeviceId],
    assignment: Assignment,
    limits: Mapping[str, Mapping[str, Limit]],
    conditions: Iterable[Condition],
) -> Split:
    assigned_bytes = sum(assignment.memory.values())
    is_shared = rules.mode is AllocationMode.SHARED or not rules.agents
    return Split(
        mode=rules.mode,
        inventory=inventory,
        partitions={
            agent: Partition(
                agent,
                (*devices, MEMORY),
                assignment.memory[agent],
                is_exclusive=rules.mode is not AllocationMode.SHARED,
                limits=limits.get(agent, {}),
            )
            for agent, devices in assignment.devices.items()
        },
        reserved_cpu=tuple(device_id.id for device_id in pool.reserved),
        reserved_mem=rules.reserved_mem,
        divided=divided,
        unassigned_memory=0 if is_shared else pool.memory_bytes - assigned_bytes,
        rule_conditions=(
            *_ignored_rule_conditions(rules),
            *_idle_agent_conditions(assignment),
            *(
                split_core_conditions(assignment.devices, pool.by_name.get(CPU, ()))
                if not is_shared
                else ()
            ),
            *conditions,
        ),
    )


def _without_agent_reason(devices: Sequence[DeviceId], *, is_new: bool) -> str:
    texts = [str(device) if device.name == CPU else device.id for device in devices]
    are, them = ("is", "it") if len(devices) == 1 else ("are", "them")
    state = f"new; restart agentd to assign {them}" if is_new else "assigned to no agent"
    return f"{join_first(texts)} {are} {state}"


def _ignored_rule_conditions(rules: SplitRules) -> Iterator[Condition]:
    mode = rules.mode.value
    for rule in rules.agents:
        about = f"agent/{rule.agent_id}"
        if rule.described and rules.mode is not AllocationMode.MANUAL:
            reason = f"[agents.resource] of {rule.agent_id} is not used in {mode} mode"
            yield Condition(about, reason)
        if rule.limits and rules.mode is not AllocationMode.SHARED:
            reason = f"limits of {rule.agent_id} are not used in {mode} mode: it has devices"
            yield Condition(about, reason)


def _idle_agent_conditions(assignment: Assignment) -> Iterator[Condition]:
    for agent, devices in assignment.devices.items():
        about = f"agent/{agent}"
        if not any(device_id.name == CPU for device_id in devices):
            reason = f"agent {agent} has no core: there are more agents than cores"
            yield Condition(about, reason)
        if not assignment.memory[agent]:
            reason = f"agent {agent} has no memory: there is less than one aligned unit for it"
            yield Condition(about, reason)
