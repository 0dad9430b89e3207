"""Manual mode: the assignment of devices by the operator's rules.

There are two passes, so that the order of agents does not matter for named devices: first the
devices that rules name, then counts and percentages, filled in agent order from the remaining ones.
Impossible rules are refused together. Devices that may return (a missing device, a failed plugin)
only cause warnings, elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property

import msgspec

from agentd.core.conditions import Condition
from agentd.core.devices import (
    Device,
    DeviceId,
    Inventory,
    by_any_name,
    group_by_name,
    named_devices,
)
from agentd.core.hardware_names import is_hardware_name, normal_name, normal_names
from agentd.core.partition.rules import (
    AgentRule,
    AllocationMode,
    Count,
    DeviceRule,
    Ids,
    MemoryRule,
    Percent,
    Size,
    SplitRules,
)
from agentd.core.printable import printable_line
from agentd.core.slots import CPU, MEM
from agentd.errors import Problem


class AssignableDevices(msgspec.Struct, frozen=True, dict=True):
    """The assignable devices by their places, and the memory, both without the reservation."""

    devices: tuple[Device, ...]
    memory_bytes: int
    reserved: tuple[DeviceId, ...]
    unlisted: Mapping[str, str]
    known_names: frozenset[str] = frozenset()
    uncounted: tuple[Device, ...] = ()
    """Devices that are excluded, and missing ones whose place another one has."""

    @cached_property
    def by_name(self) -> Mapping[str, Sequence[Device]]:
        return group_by_name(self.devices)


class Assignment(msgspec.Struct, frozen=True):
    """The devices of each agent, and its bytes of memory."""

    devices: dict[str, list[DeviceId]]
    memory: dict[str, int]


def assign_manually(pool: AssignableDevices, rules: SplitRules) -> tuple[Assignment, list[Problem]]:
    """Assign devices by the rules; return the assignment, and the problem of each bad rule."""
    return _ManualAssignment(pool, rules).run()


class _ManualAssignment:
    """One pass over the rules, which collects problems instead of stopping at the first."""

    def __init__(self, pool: AssignableDevices, rules: SplitRules) -> None:
        self._pool = pool
        self._rules = rules
        self._problems: list[Problem] = []
        self._owner: dict[DeviceId, str] = {}
        """The agent of each device, and of each name of a missing one."""
        self._assigned: dict[str, list[DeviceId]] = {r.agent_id: [] for r in rules.agents}

    def run(self) -> tuple[Assignment, list[Problem]]:
        rules = [
            (location, rule.agent_id, name, device_rule)
            for location, rule in self._described_rules()
            for name, device_rule in self._device_rules(location, rule)
        ]
        for location, agent, name, rule in rules:
            if isinstance(rule, Ids):
                self._assign_named(location, agent, name, rule)
        for location, agent, name, rule in rules:
            if not isinstance(rule, Ids):
                self._assign_counted(location, agent, name, rule)
        memory = self._assign_memory()
        known = enumerate((*self._pool.devices, *self._pool.uncounted))
        order = {device.device_id: n for n, device in known}
        assignment = Assignment(
            {agent: sorted(ids, key=order.__getitem__) for agent, ids in self._assigned.items()},
            memory,
        )
        return assignment, self._problems

    def _devices(self, name: str) -> Sequence[Device]:
        return self._pool.by_name.get(name, ())

    def _add_problem(self, location: str, reason: str) -> None:
        self._problems.append(Problem(location, reason))

    def _described_rules(self) -> Iterator[tuple[str, AgentRule]]:
        for index, rule in enumerate(self._rules.agents):
            if rule.described:
                yield f"agents.{index}.resource", rule
            else:
                reason = f"agent {rule.agent_id} has no [agents.resource]; manual mode requires one"
                self._add_problem(f"agents.{index}", f"{reason}, with cpu, mem and its devices")

    def _device_rules(self, location: str, rule: AgentRule) -> Iterator[tuple[str, DeviceRule]]:
        if rule.cpu in (None, Count(0), Ids(()), Percent(Fraction(0))):
            self._add_problem(
                f"{location}.cpu", f"agent {rule.agent_id} has no cpu, expected one core or more"
            )
        else:
            yield CPU, rule.cpu
        for name, device_rule in rule.devices.items():
            if name in self._pool.known_names or name in self._pool.by_name:
                yield name, device_rule
            elif name not in self._pool.unlisted:
                names = self._pool.known_names | self._pool.by_name.keys()
                available = ", ".join(sorted(names - {CPU, MEM})) or "none"
                self._add_problem(
                    f"{location}.devices.{printable_line(name)}",
                    f"unknown device name {name!r}; available: {available}",
                )

    def _assign_named(self, location: str, agent: str, name: str, rule: Ids) -> None:
        path = _rule_location(location, name)
        uncounted = [device for device in self._pool.uncounted if device.device_id.name == name]
        excluded = [device for device in uncounted if device.is_excluded]
        absent = normal_names(*self._rules.exclude.get(name, ()))
        devices = by_any_name([*self._devices(name), *uncounted])
        for wanted in rule.names:
            device = devices.get(normal_name(wanted))
            names = normal_names(wanted)
            is_refused = bool(names & absent or named_devices(excluded, [wanted]))
            if device.is_excluded if device else is_refused:
                self._add_problem(path, self._unassigned_reason(name, wanted, is_excluded=True))
                continue
            if device is None and not _may_be_missing(name, wanted, self._rules):
                self._add_problem(path, self._unassigned_reason(name, wanted))
                continue
            device_id = device.device_id if device else DeviceId(name, min(names, key=len))
            if (owner := self._owner.get(device_id)) is not None:
                owner_text = "again" if owner == agent else f"to {owner}, too"
                self._add_problem(path, f"{wanted} is assigned to {agent} and {owner_text}")
            elif device:
                self._assign(device_id, agent)
            else:
                self._owner[device_id] = agent

    def _unassigned_reason(self, name: str, wanted: str, *, is_excluded: bool = False) -> str:
        if name == CPU and DeviceId(name, wanted.removeprefix("cpu-")) in self._pool.reserved:
            available = ", ".join(d.device_id.id for d in self._devices(name))
            return f"core {wanted} is reserved (resource.reserved-cpu); available: {available}"
        available = ", ".join(d.device_id.id for d in self._devices(name)) or "none"
        if is_excluded:
            return f"{wanted} is excluded in [plugins.{name}]; available: {available}"
        return f"unknown {name} device {wanted!r}; available: {available}"

    def _assign_counted(self, location: str, agent: str, name: str, rule: Count | Percent) -> None:
        path, devices = _rule_location(location, name), self._devices(name)
        if isinstance(rule, Count):
            count = rule.count
        else:
            exact = rule.percent * len(devices) / 100
            if exact.denominator != 1:
                self._add_problem(path, _nearest_counts(rule, exact, len(devices)))
                return
            count = int(exact)
        free = [d.device_id for d in devices if d.device_id not in self._owner]
        if count > len(free):
            reason = f"{count} of {len(devices)} {name} devices for {agent}"
            self._add_problem(path, f"{reason}; {len(free)} are left")
        for device_id in free[:count]:
            self._assign(device_id, agent)

    def _assign(self, device_id: DeviceId, agent: str) -> None:
        self._owner[device_id] = agent
        self._assigned[agent].append(device_id)

    def _assign_memory(self) -> dict[str, int]:
        amounts = {}
        for index, rule in enumerate(self._rules.agents):
            if not rule.described:
                continue
            amount = self._memory_bytes(rule.mem)
            if not amount:
                reason = "expected a size or a percentage"
                if isinstance(rule.mem, Percent):
                    reason = f"{rule.mem} is less than memory-align-size, {self._rules.align} bytes"
                location = f"agents.{index}.resource.mem"
                self._add_problem(location, f"agent {rule.agent_id} has no mem; {reason}")
            amounts[rule.agent_id] = amount
        if sum(amounts.values()) > self._pool.memory_bytes:
            parts = " + ".join(f"{amount} for {agent}" for agent, amount in amounts.items())
            self._add_problem(
                "agents",
                f"mem adds up to {sum(amounts.values())} bytes ({parts}); this node has"
                f" {self._pool.memory_bytes} after the reservation",
            )
        return amounts

    def _memory_bytes(self, rule: MemoryRule | None) -> int:
        if rule is None:
            return 0
        if isinstance(rule, Size):
            return rule.size_bytes
        exact = self._pool.memory_bytes * rule.percent / 100
        return int(exact // self._rules.align) * self._rules.align


def missing_by_name(
    inventory: Inventory, names: Collection[str], rules: SplitRules
) -> Iterator[Condition]:
    """Yield the devices of some device names that agents name and the node does not know."""
    if rules.mode is not AllocationMode.MANUAL:
        return
    for rule in rules.agents:
        agent = rule.agent_id
        for name, device_rule in rule.devices.items():
            known = by_any_name(inventory.by_name.get(name, ()))
            for wanted in device_rule.names if isinstance(device_rule, Ids) else ():
                if name in names and normal_name(wanted) not in known:
                    reason = f"{wanted} is missing, and the configuration gives it to {agent}"
                    yield Condition(f"device/{name}/{wanted}", reason, agents=(agent,))


def _may_be_missing(name: str, wanted: str, rules: SplitRules) -> bool:
    """Return whether a name is of a device that this node had, or of a particular device."""
    return DeviceId(name, wanted) in rules.forgotten or is_hardware_name(wanted)


def _rule_location(location: str, name: str) -> str:
    return f"{location}.cpu" if name == CPU else f"{location}.devices.{name}"


def _nearest_counts(rule: Percent, exact: Fraction, total: int) -> str:
    low, high = int(exact), int(exact) + 1
    return (
        f"{rule} of {total} devices is not a whole number; the nearest counts are"
        f" {_with_percent(low, total)} and {_with_percent(high, total)}"
    )


def _with_percent(count: int, total: int) -> str:
    """Return a count, with its percentage if there is a short one."""
    percent = Fraction(100 * count, total)
    decimals = format(float(percent), "g")
    return f"{count} ({decimals}%)" if Fraction(decimals) == percent else str(count)
