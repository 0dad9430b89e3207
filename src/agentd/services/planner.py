"""Planning: from a request to slots and devices, and on to a plan for a runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from agentd.core.allocation.allocator import allocate
from agentd.core.allocation.explain import OTHER, ExplainContext, explain
from agentd.core.allocation.ledger import Allocation, ClaimRef, Ledger
from agentd.core.allocation.policy import AllocationPolicy
from agentd.core.allocation.ports import HostPort, Port, PortRange, assign_ports, port_problems
from agentd.core.allocation.steps import order_steps
from agentd.core.claim.allocation import (
    allocate_from_claim,
    allocate_observed,
    claimed_names,
    default_amounts,
    refuse_overcommitted,
    split_slots,
    with_claimed_usable,
)
from agentd.core.claim.claim import Claim, ClaimSpec, subtract_allocations
from agentd.core.devices import DeviceId, Inventory, by_any_name
from agentd.core.hardware_names import normal_name
from agentd.core.kernel.options import unsupported_members
from agentd.core.kernel.plan import KernelPlan, PlanContext, agent_resource_cap, build_plan
from agentd.core.kernel.states import Kernel, KernelSpec, lifecycle_step
from agentd.core.labels import LabelExcess
from agentd.core.partition.split import Partition
from agentd.core.slots import (
    CPU,
    MEM,
    Quantity,
    ResourceSlots,
    SlotName,
    SlotReading,
    device_name_of,
    format_amount,
    read_slots,
)
from agentd.errors import (
    MAX_PROBLEMS,
    ClaimConflict,
    InsufficientResource,
    InvalidRequest,
    Problem,
    RuntimeUnavailable,
    TooManyClaims,
    UnknownClaim,
)
from agentd.services.devices import NodeDevices
from agentd.services.protocols import Plugins, PluginState, Runtime
from agentd.services.state import NodeState


class NodeRules(msgspec.Struct, frozen=True):
    """The node's settings that decide about creates."""

    node_id: str
    policy: AllocationPolicy
    default_slots: Mapping[str, object]
    real_cores: frozenset[str]
    ports: PortRange
    is_port_free: Callable[[str, str, int], bool]
    """Return whether no other process listens on an address, protocol and port."""


class Decision(msgspec.Struct, frozen=True):
    """The grant of a create: plain decimals by slot, the devices, and ports of the node."""

    slots: Mapping[str, str]
    allocation: Allocation
    ports: tuple[Port, ...] = ()
    keeps_claim: bool = False


class ClaimedDevices(NamedTuple):
    """The claim of a request: its device names, and the devices that no other kernel holds.

    Slots of these device names come from the claim alone. With `is_kept` it outlives the kernel.
    """

    names: frozenset[str] = frozenset()
    unused: Allocation = Allocation()
    is_kept: bool = False

    def selectable_devices(
        self, named_devices: Mapping[str, frozenset[DeviceId]]
    ) -> dict[str, frozenset[DeviceId]]:
        """Return the devices that a request may take, by device name of the claim."""
        selectable = {}
        for name in self.names:
            unused = frozenset(share.device_id for share in self.unused.shares_by_device_name(name))
            selectable[name] = unused & named_devices.get(name, unused)
        return selectable


class ParsedRequest(NamedTuple):
    """The slots of a request with defaults, and the named devices by device name."""

    slots: ResourceSlots
    named_devices: Mapping[str, frozenset[DeviceId]]
    claimed: ClaimedDevices = ClaimedDevices()

    def without_cores(self, cores: Iterable[str], members: Iterable[DeviceId]) -> ParsedRequest:
        """Return the request, for cores among an agent's other ones."""
        own = frozenset(member for member in members if member.name == CPU)
        rest = self.named_devices.get(CPU, own).difference(DeviceId(CPU, core) for core in cores)
        return self._replace(named_devices={**self.named_devices, CPU: rest})


class Planner:
    """Decisions over the node's current devices; stateless."""

    def __init__(self, devices: NodeDevices, plugins: Plugins, rules: NodeRules) -> None:
        self._devices = devices
        self._plugins = plugins
        self._rules = rules

    def parse_request(
        self, spec: KernelSpec, runtime: Runtime, problems: Sequence[Problem], state: NodeState
    ) -> ParsedRequest:
        """Parse a request; `problems` are its problems found elsewhere.

        Raises:
            UnsupportedResource: a slot is unknown on this node.
            RequestError: the request is invalid; lists every problem.
            PluginUnavailable: a slot may belong to a pending plugin.
        """
        claimed = _find_claimed_devices(spec, state)
        reading = self._reading(spec, runtime, claimed)
        inventory, partition = self._devices.inventory, self._devices.partition(spec.agent_id)
        named_devices, problems_of_names = _resolve_named_devices(
            spec, reading, inventory, partition
        )
        others = [
            *problems_of_names,
            *port_problems(spec.ports, self._rules.ports),
            *problems,
            *unsupported_members(spec, runtime.name, runtime.members),
        ]
        return ParsedRequest(reading.accepted(others), named_devices, claimed)

    def parse_claim_request(self, spec: ClaimSpec) -> ParsedRequest:
        """Read what a claim asks for; slots that it leaves out are zero.

        Raises:
            UnsupportedResource: this node cannot know a slot.
            RequestError: something is wrong with it; all of it is listed.
            PluginUnavailable: a plugin that may know a slot is pending.
        """
        reading = self._read_slots(spec.slots)
        inventory, partition = self._devices.inventory, self._devices.partition(spec.agent_id)
        named_devices, problems_of_names = _resolve_named_devices(
            spec, reading, inventory, partition
        )
        slots = reading.accepted(problems_of_names)
        if not slots:
            raise InvalidRequest([Problem("slots", "expected an amount of at least one slot")])
        return ParsedRequest(slots, named_devices)

    def decide_claim(self, spec: ClaimSpec, request: ParsedRequest, state: NodeState) -> Decision:
        """Choose devices for a claim; changes nothing. An observed one may meet other holders.

        Raises:
            TooManyClaims: its labels exceed a sum of the node.
            InsufficientResource: it cannot be granted.
        """
        if (excess := self._label_excess(spec, state)) is not None:
            used = f"{excess.size} bytes of labels, {excess.free} free"
            raise TooManyClaims(f"{used}; {excess.bound}")
        inventory, partition = self._devices.inventory, self._devices.partition(spec.agent_id)
        policy = self._policy(spec)
        wanted = (partition, request.slots, policy, request.named_devices)
        try:
            allocation = allocate(state.ledger, inventory, *wanted)
        except InsufficientResource:
            if not spec.is_observed:
                raise
            allocation = allocate_observed(inventory, *wanted)
        return Decision(allocation.wire_totals(), allocation)

    def _label_excess(self, spec: KernelSpec | ClaimSpec, state: NodeState) -> LabelExcess | None:
        return state.label_excess(spec, len(self._devices.split.partitions))

    def decide(self, spec: KernelSpec, request: ParsedRequest, state: NodeState) -> Decision:
        """Choose devices and ports for a request; changes nothing.

        Raises:
            RequestError: the request cannot be granted.
        """
        if (excess := self._label_excess(spec, state)) is not None:
            amounts = f"{excess.size}", f"{excess.free}"
            raise InsufficientResource("labels", *amounts, (), limit=excess.bound)
        inventory, policy = self._devices.inventory, self._policy(spec)
        partition = self._devices.partition(spec.agent_id)
        claimed_slots, free_slots = split_slots(request.slots, request.claimed.names)
        named_devices = request.named_devices
        claim, from_claim = state.claims.get(spec.claim_id or ""), Allocation()
        if claim and not claimed_slots and not any(map(_is_amount, spec.slots.values())):
            raise _nothing_left(claim, state)
        if claimed_slots:
            from_claim = allocate_from_claim(
                request.claimed.unused,
                inventory,
                spec.agent_id,
                claimed_slots,
                policy,
                named_devices,
            )
            if claim and claim.is_observed and not spec.overcommits:
                refuse_overcommitted(from_claim, inventory, state.ledger)
        from_free = allocate(state.ledger, inventory, partition, free_slots, policy, named_devices)
        allocation = Allocation((*from_claim.shares, *from_free.shares))
        ports = self._assign_host_ports(spec, state)
        return Decision(allocation.wire_totals(), allocation, ports, request.claimed.is_kept)

    def _policy(self, spec: KernelSpec | ClaimSpec) -> AllocationPolicy:
        policy = self._rules.policy
        return replace(policy, is_discreet=True) if spec.is_discreet else policy

    def _assign_host_ports(self, spec: KernelSpec, state: NodeState) -> tuple[Port, ...]:
        """Assign host ports, skipping those on which another process listens."""
        if not spec.ports:
            return ()
        holders = _visible_port_holders(spec, state)
        allowed, busy = self._rules.ports, set[HostPort]()
        while True:
            ports = assign_ports(spec.ports, holders, busy, allowed)
            newly_busy = {
                (port.protocol, port.host)
                for port in ports
                if port.host
                and not self._rules.is_port_free(port.address, port.protocol, port.host)
            }
            if not newly_busy:
                return ports
            busy |= newly_busy

    def explain(
        self, spec: KernelSpec, request: ParsedRequest, decision: Decision, ledger: Ledger
    ) -> dict[str, list[dict[str, object]]]:
        """Return a row for each device and slot of a decision, for derived slots too."""
        inventory = with_claimed_usable(self._devices.inventory, request.claimed.unused)
        partition, policy = self._devices.partition(spec.agent_id), self._policy(spec)
        types = inventory.slot_types
        named = {
            types[step.slot].family: step.amounts for step in order_steps(request.slots, types)
        }
        if spec.claim_id is not None:  # as if its rest were free, to this request alone
            ledger = ledger.without(ClaimRef(spec.claim_id))
        named_devices = {
            **request.named_devices,
            **request.claimed.selectable_devices(request.named_devices),
        }
        granted: dict[SlotName, dict[DeviceId, int]] = {}
        for share in decision.allocation.shares:
            for slot, _, amount in share.amounts:
                if slot in types:  # a claim may have been given one that is switched off now
                    granted.setdefault(slot, {})[share.device_id] = amount
        return {
            slot: explain(
                ExplainContext(
                    ledger,
                    inventory,
                    partition,
                    types[slot],
                    named[types[slot].family],
                    policy,
                    named_devices.get(device_name_of(slot)),
                    by_device,
                )
            )
            for slot, by_device in granted.items()
        }

    def refuse_unsupported(self, slots: Mapping[str, object]) -> None:
        """Refuse unknown slots.

        Raises:
            UnsupportedResource: unknown slots have non-zero amounts.
        """
        self._read_slots(slots)

    def _read_slots(self, amounts: Mapping[str, object]) -> SlotReading:
        types, statuses = self._devices.inventory.slot_types, self._plugins.statuses()
        known = {device_name_of(name) for name in types}
        return read_slots(
            amounts,
            types,
            unavailable={
                s.name: s.text
                for s in statuses
                if s.state in (PluginState.PENDING, PluginState.STOPPED)
                or (s.state is PluginState.FAILED and s.name in known)
            },
            failed={s.name: s.reason for s in statuses if s.state is PluginState.FAILED},
            absent={s.name: s.reason for s in statuses if s.state is PluginState.ABSENT},
        )

    def _reading(self, spec: KernelSpec, runtime: Runtime, claimed: ClaimedDevices) -> SlotReading:
        types = self._devices.inventory.slot_types
        defaults = {
            slot: amount
            for slot, amount in self._rules.default_slots.items()
            if device_name_of(slot) not in claimed.names
        }
        claim_defaults = (
            default_amounts(claimed.unused, _requested_device_names(spec)) if claimed.names else {}
        )
        claim_amounts = {
            slot: format_amount(amount, types[slot].kind)
            for slot, amount in claim_defaults.items()
            if slot in types
        }
        reading = self._read_slots({**defaults, **spec.slots, **claim_amounts})
        minimum = max(1, runtime.minimum_memory_bytes)
        memory_bytes = reading.slots[MEM]
        if memory_bytes < minimum and all(
            problem.where != "slots.mem" for problem in reading.problems
        ):
            limit = f"the minimum of the {runtime.name} runtime, {minimum}"
            reason = f"{memory_bytes} bytes are below {limit}"
            return reading._replace(problems=(*reading.problems, Problem("slots.mem", reason)))
        return reading

    def notify_plugins(self, before: Kernel | None, now: Kernel | None) -> None:
        """Notify the plugins of a step in a kernel's life, if the change is one."""
        kernel = now or before
        step = lifecycle_step(before, now)
        if kernel is not None and step is not None and kernel.allocation.shares:
            self._plugins.notify(step, kernel.kernel_id, kernel.allocation)

    async def plan(
        self, kernel: Kernel, spec: KernelSpec, state: NodeState, runtime: Runtime
    ) -> KernelPlan:
        """Collect the plugins' edits and return the plan.

        Raises:
            InvalidRequest: the request sets something that only a plugin may set.
            PluginUnavailable: a plugin did not return the edits for its devices.
            RuntimeUnavailable: none of the agent's cores is there.
        """
        support = await runtime.support(spec)
        edits = await self._plugins.container_edits(kernel.allocation, support.features)
        missing = support.not_enforced | _find_unenforced_slots(
            kernel.allocation, self._devices.inventory
        )
        partition, real = self._devices.partition(spec.agent_id), self._rules.real_cores
        cores = [device.id for device in partition.devices if device.name == CPU]
        if not cores:
            missing |= {CPU}
        by_id = self._devices.inventory.by_id
        present = tuple(core for core in cores if not by_id[DeviceId(CPU, core)].withheld)
        if cores and not present:
            raise RuntimeUnavailable(f"no core of agent {spec.agent_id} is there")
        ledger = state.ledger  # without the kernel of a dry run
        if kernel.kernel_id not in ledger.holdings:
            ledger = ledger.with_holding(kernel.kernel_id, kernel.agent_id, kernel.allocation)
        resource_cap = agent_resource_cap(
            spec.agent_id, cores, partition.memory_bytes, real, ledger
        )
        node = PlanContext(self._rules.node_id, present, real, missing, resource_cap)
        return build_plan(spec, kernel, edits, node)


def _find_unenforced_slots(allocation: Allocation, inventory: Inventory) -> frozenset[str]:
    """Return the slots of partial devices whose share nothing enforces."""
    return frozenset(
        slot
        for share in allocation.shares
        if share.device_id.name not in (CPU, MEM)
        for slot, measure in inventory.measures[share.device_id].items()
        if share.amount_of(slot) < measure.usable and not inventory.slot_types[slot].is_enforced
    )


def _visible_port_holders(spec: KernelSpec, state: NodeState) -> Mapping[HostPort, str]:
    """Return the holder of each host port; a discreet request does not learn of other agents."""
    if not spec.is_discreet:
        return state.ports
    agents = {kernel.kernel_id: kernel.agent_id for kernel in state}
    return {
        port: holder if agents.get(holder) == spec.agent_id else OTHER
        for port, holder in state.ports.items()
    }


def _find_claimed_devices(spec: KernelSpec, state: NodeState) -> ClaimedDevices:
    """Return the devices of a request's claim.

    Raises:
        UnknownClaim: there is none, or it is not the caller's to use.
        InvalidRequest: it is of another agent.
        ClaimConflict: another kernel uses it, or its record cannot be read.
    """
    if spec.claim_id is None:
        return ClaimedDevices()
    claim = state.claims.get(spec.claim_id)
    is_known = claim is not None and (spec.caller is None or claim.may_be_used_by(spec.caller))
    if claim is None or not is_known or spec.claim_id in state.closed_claims:
        raise UnknownClaim.of(spec.claim_id)
    claim.require_readable()
    if claim.agent_id != spec.agent_id:
        reason = f"claim {claim.claim_id} is of agent {claim.agent_id}"
        raise InvalidRequest([Problem("claim", reason)])
    users = state.claim_kernels(claim.claim_id)
    is_kept = claim.owner_uid is not None if spec.keeps_claim is None else spec.keeps_claim
    if users and not (is_kept and all(kernel.keeps_claim for kernel in users.values())):
        kernel_ids = ", ".join(users)
        raise ClaimConflict(f"claim {claim.claim_id} is used by kernel {kernel_ids}")
    unused = subtract_allocations(
        claim.allocation, (kernel.allocation for kernel in users.values())
    )
    return ClaimedDevices(claimed_names(claim.allocation), unused, is_kept)


def _nothing_left(claim: Claim, state: NodeState) -> InsufficientResource:
    """Return the refusal of a request for what is left of a claim: its kernels hold it all."""
    slot, amount = next(iter(claim.slots.items()))
    users = ", ".join(state.claim_kernels(claim.claim_id)) or "none"
    amounts = f"nothing is left of claim {claim.claim_id} (its kernels: {users})"
    return InsufficientResource(slot, amount, "0", (), amounts=amounts)


def _requested_device_names(spec: KernelSpec) -> frozenset[str]:
    """Return the device names that a request has an amount for; cpu and mem may be zero."""
    return frozenset(
        device_name_of(slot)
        for slot, amount in spec.slots.items()
        if slot in (CPU, MEM) or _is_amount(amount)
    )


def _is_amount(amount: object) -> bool:
    """Return whether an amount of a request is not zero."""
    return not isinstance(amount, Quantity) or bool(amount.value)


def _resolve_named_devices(
    spec: KernelSpec | ClaimSpec, reading: SlotReading, inventory: Inventory, partition: Partition
) -> tuple[dict[str, frozenset[DeviceId]], list[Problem]]:
    """Return the devices that a request names, by device name, and the first mistake of each.

    A discreet request finds only its agent's devices. The mistakes are unknown devices, and devices
    without a requested slot. For a pending plugin the devices are not known yet.
    """
    problems: list[Problem] = []
    named_devices = {}
    requested = {device_name_of(slot) for slot, amount in reading.slots.items() if amount}
    unread = {device_name_of(item.where.removeprefix("slots.")) for item in reading.problems}
    for name, wanted in spec.devices.items():
        if name in reading.late:
            continue
        devices = [
            device
            for device in inventory.by_name.get(name, ())
            if not spec.is_discreet or device.device_id in partition.members
        ]
        by_key = by_any_name(devices)
        found = {key: by_key.get(normal_name(key)) for key in wanted}
        named_devices[name] = frozenset(device.device_id for device in found.values() if device)
        known_ids = ", ".join(device.device_id.id for device in devices) or "none"
        unknown = (
            Problem(
                f"devices.{name}.{place}", f"unknown device {key!r} (this node has: {known_ids})"
            )
            for place, key in enumerate(wanted)
            if found[key] is None
        )
        problems += islice(unknown, MAX_PROBLEMS + 1 - len(problems))
        if named_devices[name] and name not in requested | unread:
            problems.append(Problem(f"devices.{name}", f"no slot of {name} is requested"))
    return named_devices, problems
