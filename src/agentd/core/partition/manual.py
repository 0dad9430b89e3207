"""Manual mode: the assignment of devices by the operator's rules.

There are two passes, so that the order of agents does not matter for named devices: first the
devices that rules name, then counts and percentages, filled in agent order from the remaining ones.
Impossible rules are refused together. Devices that may return (a missing device, a failed plugin)
only cause warnings, elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import msgspec

from agentd.core.devices import Device, DeviceId, by_name
from agentd.core.partition.rules import (
    AgentRule,
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


@dataclass(frozen=True)
class AssignableDevices:
    """The assignable devices in natural order, and the memory, both without the reservation."""

    devices: tuple[Device, ...]
    memory_bytes: int
    reserved: frozenset[DeviceId]
    unlisted: Mapping[str, str]
    known_names: frozenset[str] = frozenset()

    @cached_property
    def by_name(self) -> Mapping[str, Sequence[Device]]:
        return by_name(self.devices)


class Assignment(msgspec.Struct, frozen=True):
    """The devices of each agent, and its bytes of memory."""

    devices: dict[str, list[DeviceId]]
    memory: dict[str, int]


def assign_manually(pool: AssignableDevices, rules: SplitRules) -> tuple[Assignment, list[Problem]]:
    """Assign devices by the rules; return the assignment, and the problem of each bad rule."""
    return _Assigning(pool, rules).run()


class _Assigning:
    """One pass over the rules, which collects problems instead of stopping at the first."""

    def __init__(self, pool: AssignableDevices, rules: SplitRules) -> None:
        self._pool = pool
        self._rules = rules
        self._problems: list[Problem] = []
        self._owner: dict[DeviceId, str] = {}
        self._assigned: dict[str, list[DeviceId]] = {r.agent_id: [] for r in rules.agents}

    def run(self) -> tuple[Assignment, list[Problem]]:
        wanted = [
            (where, rule.agent_id, name, device_rule)
            for where, rule in self._described()
            for name, device_rule in self._device_rules(where, rule)
        ]
        for where, agent, name, rule in wanted:
            if isinstance(rule, Ids):
                self._assign_named(where, agent, name, rule)
        for where, agent, name, rule in wanted:
            if not isinstance(rule, Ids):
                self._assign_some(where, agent, name, rule)
        memory = self._memory()
        order = {device.device_id: n for n, device in enumerate(self._pool.devices)}
        assignment = Assignment(
            {agent: sorted(ids, key=order.__getitem__) for agent, ids in self._assigned.items()},
            memory,
        )
        return assignment, self._problems

    def _devices(self, name: str) -> Sequence[Device]:
        return self._pool.by_name.get(name, ())

    def _refuse(self, where: str, why: str) -> None:
        self._problems.append(Problem(where, why))

    def _described(self) -> Iterator[tuple[str, AgentRule]]:
        for index, rule in enumerate(self._rules.agents):
            if rule.described:
                yield f"agents.{index}.resource", rule
            else:
                why = f"agent {rule.agent_id} has no [agents.resource]; manual mode requires one"
                self._refuse(f"agents.{index}", f"{why}, with cpu, mem and its devices")

    def _device_rules(self, where: str, rule: AgentRule) -> Iterator[tuple[str, DeviceRule]]:
        if rule.cpu is None or _is_nothing(rule.cpu):
            self._refuse(
                f"{where}.cpu", f"agent {rule.agent_id} has no cpu, expected one core or more"
            )
        else:
            yield CPU, rule.cpu
        for name, device_rule in rule.devices.items():
            if name in self._pool.known_names or name in self._pool.by_name:
                yield name, device_rule
            elif name not in self._pool.unlisted:
                names = self._pool.known_names | self._pool.by_name.keys()
                have = ", ".join(sorted(names - {CPU, MEM})) or "none"
                self._refuse(
                    f"{where}.devices.{printable_line(name)}",
                    f"unknown device name {name!r}; available: {have}",
                )

    def _assign_named(self, where: str, agent: str, name: str, rule: Ids) -> None:
        path = _path(where, name)
        for wanted in rule.names:
            device = next((d for d in self._devices(name) if d.answers_to(wanted)), None)
            if device is None:
                self._refuse(path, self._why_not_assigned(name, wanted))
            elif (owner := self._owner.get(device.device_id)) is not None:
                who = "again" if owner == agent else f"to {owner}, too"
                self._refuse(path, f"{wanted} is assigned to {agent} and {who}")
            else:
                self._give(device.device_id, agent)

    def _why_not_assigned(self, name: str, wanted: str) -> str:
        if name == CPU and DeviceId(name, wanted.removeprefix("cpu-")) in self._pool.reserved:
            have = ", ".join(d.device_id.id for d in self._devices(name))
            return f"core {wanted} is reserved (resource.reserved-cpu); available: {have}"
        have = ", ".join(d.device_id.id for d in self._devices(name)) or "none"
        return f"unknown {name} device {wanted!r}; available: {have}"

    def _assign_some(self, where: str, agent: str, name: str, rule: Count | Percent) -> None:
        path, devices = _path(where, name), self._devices(name)
        if isinstance(rule, Count):
            count = rule.count
        else:
            exact = rule.percent * len(devices) / 100
            if exact.denominator != 1:
                self._refuse(path, _nearest_counts(rule, exact, len(devices)))
                return
            count = int(exact)
        free = [d.device_id for d in devices if d.device_id not in self._owner]
        if count > len(free):
            why = f"{count} of {len(devices)} {name} devices for {agent}"
            self._refuse(path, f"{why}; {len(free)} are left")
        for device_id in free[:count]:
            self._give(device_id, agent)

    def _give(self, device_id: DeviceId, agent: str) -> None:
        self._owner[device_id] = agent
        self._assigned[agent].append(device_id)

    def _memory(self) -> dict[str, int]:
        amounts = {}
        for index, rule in enumerate(self._rules.agents):
            if not rule.described:
                continue
            amount = self._memory_bytes(rule.mem)
            if not amount:
                why = "expected a size or a percentage"
                if isinstance(rule.mem, Percent):
                    why = f"{rule.mem} is less than memory-align-size, {self._rules.align} bytes"
                where = f"agents.{index}.resource.mem"
                self._refuse(where, f"agent {rule.agent_id} has no mem; {why}")
            amounts[rule.agent_id] = amount
        if sum(amounts.values()) > self._pool.memory_bytes:
            parts = " + ".join(f"{amount} for {agent}" for agent, amount in amounts.items())
            self._refuse(
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


def _path(where: str, name: str) -> str:
    return f"{where}.cpu" if name == CPU else f"{where}.devices.{name}"


def _is_nothing(rule: DeviceRule) -> bool:
    return rule in (Count(0), Ids(()), Percent(Fraction(0)))


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
