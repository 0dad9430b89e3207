"""From a request to slots and devices, and from devices to a plan that a runtime can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice

import msgspec
from msgspec.structs import replace

from agentd.core.allocation import Allocation, Ledger, Policy, allocate
from agentd.core.devices import DeviceId, Inventory
from agentd.core.explain import OTHER, Question, explain
from agentd.core.kernel import Kernel, KernelSpec, Port, step_between
from agentd.core.partition import Partition
from agentd.core.plan import KernelPlan, NodeFacts, build_plan, fence_of
from agentd.core.ports import HostPort, PortRange, hand_out
from agentd.core.slots import CPU, MEM, ResourceSlots, device_name_of, parse_slots
from agentd.errors import MOST_PROBLEMS, InvalidRequest, InvalidSlotAmount, Problem
from agentd.services.devices import NodeDevices
from agentd.services.interfaces import Plugins, PluginState, Runtime
from agentd.services.state import NodeState


class NodeRules(msgspec.Struct, frozen=True):
    """What creates follow besides the request."""

    node_id: str
    policy: Policy
    default_slots: Mapping[str, object]
    real_cores: frozenset[str]
    ports: PortRange
    is_port_free: Callable[[str, str, int], bool]
    """Whether nobody else on the node listens there: address, protocol, port."""


class Decision(msgspec.Struct, frozen=True):
    """What a kernel is given: plain decimals by slot, the devices, and ports of the node."""

    slots: Mapping[str, str]
    allocation: Allocation
    ports: tuple[Port, ...] = ()


class Planner:
    """Decides over the node's devices as they are now; keeps nothing."""

    def __init__(self, devices: NodeDevices, plugins: Plugins, rules: NodeRules) -> None:
        self._devices = devices
        self._plugins = plugins
        self._rules = rules

    def decide(self, spec: KernelSpec, state: NodeState, runtime: Runtime) -> Decision:
        """Choose slots, devices and ports for a request; changes nothing.

        Raises:
            RequestError, PluginUnavailable: it cannot be granted.
        """
        inventory = self._devices.inventory
        slots = self._slots(spec, runtime)
        partition = self._devices.partition(spec.agent_id)
        policy, only = self._policy(spec), _named(spec, slots, inventory, partition)
        allocation = allocate(state.ledger, inventory, partition, slots, policy, only)
        ports = self._ports(spec, _holders(spec, state))
        return Decision(slots.to_wire(inventory.slot_types), allocation, ports)

    def _policy(self, spec: KernelSpec) -> Policy:
        policy = self._rules.policy
        return replace(policy, is_discreet=True) if spec.is_discreet else policy

    def _ports(self, spec: KernelSpec, holders: Mapping[HostPort, str]) -> tuple[Port, ...]:
        """Hand out ports, leaving out what something else on the node listens on."""
        allowed, busy = self._rules.ports, set[HostPort]()
        while True:
            ports = hand_out(spec.ports, holders, busy, allowed)
            found = {
                (port.protocol, port.host)
                for port in ports
                if port.host
                and not self._rules.is_port_free(port.address, port.protocol, port.host)
            }
            if not found:
                return ports
            busy |= found

    def explain(
        self, spec: KernelSpec, decision: Decision, ledger: Ledger, runtime: Runtime
    ) -> dict[str, list[dict[str, object]]]:
        """Return for each slot of a decision how every device was looked at."""
        inventory, policy = self._devices.inventory, self._policy(spec)
        partition = self._devices.partition(spec.agent_id)
        slots = self._slots(spec, runtime)
        only = _named(spec, slots, inventory, partition)
        rows = {}
        for slot, amount in slots.items():
            shares = (share for share in decision.allocation.shares if share.slot == slot)
            given = {share.device_id: share.amount for share in shares}
            slot_type, named = inventory.slot_types[slot], only.get(device_name_of(slot))
            rows[slot] = explain(
                Question(ledger, inventory, partition, slot_type, amount, policy, named, given)
            )
        return rows

    def _slots(self, spec: KernelSpec, runtime: Runtime) -> ResourceSlots:
        types = self._devices.inventory.slot_types
        asked = {**self._rules.default_slots, **spec.slots}
        statuses = () if asked.keys() <= types.keys() else self._plugins.statuses()
        slots = parse_slots(
            asked,
            types,
            pending={s.name: s.reason for s in statuses if s.state is PluginState.PENDING},
            failed={
                s.name: s.reason
                for s in statuses
                if s.state in (PluginState.FAILED, PluginState.ABSENT)
            },
        )
        least = max(1, runtime.minimum_memory_bytes)
        if slots[MEM] < least:
            why = f"{slots[MEM]} bytes are too few; the {runtime.name} runtime needs {least}"
            raise InvalidSlotAmount([Problem("slots.mem", why)])
        return slots

    def notify_plugins(self, before: Kernel | None, now: Kernel | None) -> None:
        """Let the plugins know of the step between two states of a kernel, if it is one."""
        kernel = now or before
        step = step_between(before, now)
        if kernel is not None and step is not None and kernel.allocation.shares:
            self._plugins.notify(step, kernel.kernel_id, kernel.allocation)

    async def plan(
        self, kernel: Kernel, spec: KernelSpec, state: NodeState, runtime: Runtime
    ) -> KernelPlan:
        """Ask the plugins, and bring everything together.

        Raises:
            InvalidRequest: the request sets what only a plugin may set.
            PluginUnavailable: a plugin did not say what its devices need.
        """
        support = await runtime.support(spec)
        edits = await self._plugins.container_edits(kernel.allocation, support.features)
        missing = support.not_enforced | _unheld(kernel.allocation, self._devices.inventory)
        partition, real = self._devices.partition(spec.agent_id), self._rules.real_cores
        cores = [device.id for device in partition.devices if device.name == CPU]
        if not cores:
            missing |= {CPU}
        ledger = state.ledger  # a dry run's kernel is not in it
        if kernel.kernel_id not in ledger.holdings:
            ledger = ledger.with_held(kernel.kernel_id, kernel.agent_id, kernel.allocation)
        fence = fence_of(spec.agent_id, cores, partition.memory_bytes, real, ledger)
        node = NodeFacts(self._rules.node_id, tuple(cores), real, missing, fence)
        return build_plan(spec, kernel, edits, node)


def _unheld(allocation: Allocation, inventory: Inventory) -> frozenset[str]:
    """Return the slots of which a kernel has a part of a device that nothing holds it to."""
    return frozenset(
        share.slot
        for share in allocation.shares
        if share.device_id.name not in (CPU, MEM)
        and share.amount < inventory.by_id[share.device_id].capacity
        and not inventory.slot_types[share.slot].is_enforced
    )


def _holders(spec: KernelSpec, state: NodeState) -> Mapping[HostPort, str]:
    """Return who has which port of the node; a discreet request hears of no other agent's."""
    if not spec.is_discreet:
        return state.ports
    agents = {kernel.kernel_id: kernel.agent_id for kernel in state}
    return {
        port: holder if agents.get(holder) == spec.agent_id else OTHER
        for port, holder in state.ports.items()
    }


def _named(
    spec: KernelSpec, slots: ResourceSlots, inventory: Inventory, partition: Partition
) -> dict[str, frozenset[DeviceId]]:
    """Return the devices that a request names, by device name; a discreet one, of its agent's.

    Raises:
        InvalidRequest: there are no such devices, or nothing of them is asked for; the first
            of these mistakes are listed.
    """
    problems: list[Problem] = []
    found = {}
    asked = {device_name_of(slot) for slot, amount in slots.items() if amount}
    for name, wanted in spec.devices.items():
        devices = [
            device
            for device in inventory.by_name.get(name, ())
            if not spec.is_discreet or device.device_id in partition.members
        ]
        by_key = {key: d.device_id for d in devices for key in (*d.names, d.device_id.id)}
        found[name] = frozenset(by_key[key] for key in wanted if key in by_key)
        have = ", ".join(device.device_id.id for device in devices) or "none of that name"
        unknown = (
            Problem(f"devices.{name}.{place}", f"no device {key!r}; the node has {have}")
            for place, key in enumerate(wanted)
            if key not in by_key
        )
        problems += islice(unknown, MOST_PROBLEMS + 1 - len(problems))
        if found[name] and name not in asked:
            problems.append(Problem(f"devices.{name}", f"no slot of {name} is asked for"))
    if problems:
        raise InvalidRequest(problems)
    return found
