"""Conversions from the services' values to wire types; no decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from msgspec.structs import asdict

from agentd import __version__
from agentd.core.allocation.allocator import Ledger
from agentd.core.devices import Device, Health, Inventory
from agentd.core.kernel.states import ENDED, LIVE, Kernel
from agentd.core.partition.split import Split
from agentd.core.slots import CPU, MEM, SlotName, SlotType, device_name_of, format_amount
from agentd.events import Audit, Event, EventKind
from agentd.services.devices import NodeDevices
from agentd.services.protocols import Plugins, PluginStatus
from agentd.services.refusals import Refusal
from agentd.services.selfcheck import Check
from agentd.services.state import NodeState, RuntimeStatus
from agentd.views import (
    AgentView,
    CheckView,
    DeviceView,
    KernelView,
    LimitView,
    NodeView,
    PluginView,
    RefusalView,
    RuntimeView,
    SlotTypeView,
    SlotUseView,
)

DeviceState: TypeAlias = Literal[
    "ok", "held", "unhealthy", "drained", "gone", "withheld", "overcommitted"
]


def kernel_view(kernel: Kernel, inventory: Inventory) -> KernelView:
    """Return a kernel, including its unknown slots and degraded devices."""
    return {
        "kernel_id": kernel.kernel_id,
        "agent_id": kernel.agent_id,
        "state": kernel.state.value,
        "slots": dict(kernel.slots),
        "allocation": kernel.allocation.to_wire() if kernel.holds else {},
        "unknown_slots": {
            name: amount
            for name, amount in kernel.slots.items()
            if kernel.holds and name not in inventory.slot_types
        },
        "degraded": _degraded(kernel, inventory) if kernel.holds else [],
        "ports": [
            {"container": p.container, "host": p.host, "protocol": p.protocol, "address": p.address}
            for p in (kernel.ports if kernel.holds else ())
        ],
        "container_id": kernel.handle if kernel.runtime == "docker" else None,
        "pid": kernel.pid,
        "unit": kernel.unit,
        "created_at": wire_time(kernel.created_at) or "",
        "started_at": wire_time(kernel.started_at),
        "finished_at": wire_time(kernel.ending.finished_at),
        "exit_code": kernel.ending.exit_code,
        "oom_killed": kernel.ending.oom_killed,
        "pull": {"current": kernel.pull.current, "total": kernel.pull.total}
        if kernel.pull
        else None,
        "reason": kernel.reason or kernel.ending.reason,
        "not_enforced": list(kernel.not_enforced),
        "created_by": kernel.created_by,
        "image": kernel.image,
        "command": list(kernel.command),
        "env": list(kernel.env_names),
        "mounts": [
            {"source": m.source, "target": m.target, "read_only": m.read_only}
            for m in kernel.mounts
        ],
        "labels": dict(kernel.labels),
    }


def _ignored(state: NodeState) -> Iterator[str]:
    return (what for status in state.runtimes.values() for what in status.ignored)


def _degraded(kernel: Kernel, inventory: Inventory) -> list[str]:
    ids = dict.fromkeys(share.device_id for share in kernel.allocation.shares)
    devices = (inventory.by_id[device_id] for device_id in ids if device_id in inventory.by_id)
    broken = [
        f"{device.device_id}: {'gone' if device.gone else 'unhealthy'}: {device.reason}"
        for device in devices
        if (device.gone and device.health is not Health.UNKNOWN)
        or device.health is Health.UNHEALTHY
    ]
    return [*kernel.degraded, *broken]


def wire_time(seconds: float | None) -> str | None:
    """Convert epoch seconds to RFC 3339 in UTC."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def device_view(
    device: Device, split: Split, ledger: Ledger, named: Callable[[str], str] = str
) -> DeviceView:
    """Return a device with its holders and its gravest state.

    `named` maps a kernel id to the name that is shown.
    """
    holders = ledger.holders(device.device_id)
    state, reason = _device_state(device, ledger, named)
    agents = split.agents_of(device.device_id)
    if not agents and not reason:
        is_reserved = device.device_id.name == CPU and device.device_id.id in split.reserved_cpu
        reason = "reserved for the system" if is_reserved else "assigned to no agent"
    for_agents = sum(ledger.free(device, split.partitions[agent]) for agent in agents)
    free = max(0, min(for_agents, device.capacity - ledger.used(device.device_id)))
    kind = next((share.kind for share in holders.values() if share.slot), device.kind)
    return {
        "device_name": device.device_id.name,
        "id": device.device_id.id,
        "stable_id": device.stable_id,
        "aliases": list(device.aliases),
        "agents": agents,
        "state": state,
        "reason": reason,
        "numa_node": device.numa_node,
        "model": device.model,
        "slot": device.slot,
        "capacity": format_amount(device.capacity, device.kind),
        "allocated": format_amount(ledger.used(device.device_id), kind),
        "free": format_amount(free, device.kind),
        "holders": [
            {"kernel_id": named(kernel_id), "amount": format_amount(share.amount, share.kind)}
            for kernel_id, share in holders.items()
        ],
    }


def _device_state(  # noqa: PLR0911 - one line for each state, the gravest first
    device: Device, ledger: Ledger, named: Callable[[str], str]
) -> tuple[DeviceState, str]:
    if device.gone:
        return "gone", device.reason
    if device.health is Health.UNHEALTHY:
        return "unhealthy", device.reason
    if device.withheld:
        return "withheld", device.withheld
    if holders := ledger.kept_back_by(device):
        shares = {kernel_id: ledger.holders(device.device_id)[kernel_id] for kernel_id in holders}
        held = [
            f"kernel {named(kernel_id)} holds {_what(share.slot)}"
            for kernel_id, share in shares.items()
        ]
        until = "the kernel ends" if len(held) == 1 else "the kernels end"
        return "held", f"{', '.join(held)}; unavailable until {until}"
    if (used := ledger.used(device.device_id)) > device.capacity:
        over = format_amount(used - device.capacity, device.kind)
        return "overcommitted", f"over-allocated by {over}"
    if device.drained:
        return "drained", "drained by an operator"
    return "ok", ""


def _what(slot: SlotName) -> str:
    return f"{slot} of it" if slot else "it, or what it is a part of"


def agent_view(agent_id: str, split: Split, ledger: Ledger) -> AgentView:
    """Return an agent's partition and the usage of its slots."""
    factors = split.scaling_factors(agent_id)
    return {
        "agent_id": agent_id,
        "devices": partition_devices(split, agent_id),
        "slots": {
            name: _slot_use(agent_id, slot, split, ledger)
            for name, slot in split.inventory.slot_types.items()
        },
        "scaling_factors": {name: format(factor, "f") for name, factor in factors.items()},
        "limits": limit_views(agent_id, split, ledger),
    }


def limit_views(agent_id: str, split: Split, ledger: Ledger) -> dict[str, LimitView]:
    """Return an agent's limits and the amount it holds under each, by device name."""
    return {
        name: {
            "limit": str(limit),
            "held": format_amount(ledger.held_of(agent_id, name), limit.kind),
            "guaranteed": name in split.guaranteed,
        }
        for name, limit in split.partitions[agent_id].limits.items()
    }


def partition_devices(split: Split, agent_id: str) -> dict[str, list[str]]:
    """Return the ids of an agent's devices by device name, without memory."""
    names: dict[str, list[str]] = {name: [] for name in split.inventory.by_name if name != MEM}
    for device_id in split.partitions[agent_id].devices:
        if device_id.name != MEM:
            names[device_id.name].append(device_id.id)
    return names


def _slot_use(agent_id: str, slot: SlotType, split: Split, ledger: Ledger) -> SlotUseView:
    partition, inventory = split.partitions[agent_id], split.inventory
    devices = inventory.by_slot.get(slot.name, ())
    allocated = sum(
        share.amount
        for holding in ledger.holdings.values()
        if holding.agent_id == agent_id
        for share in holding.allocation.shares
        if share.slot == slot.name
    )
    free = sum(ledger.free(d, partition) // slot.quantum * slot.quantum for d in devices)
    if (left := ledger.within_limit(partition, device_name_of(slot.name))) is not None:
        free = min(free, left // slot.quantum * slot.quantum)
    return {
        "capacity": format_amount(split.slots_of(agent_id)[slot.name], slot.kind),
        "allocated": format_amount(allocated, slot.kind),
        "free": format_amount(free, slot.kind),
    }


def slot_type_view(slot: SlotType) -> SlotTypeView:
    """Return a slot type with its quantum as a plain decimal."""
    return {
        "name": slot.name,
        "device_name": device_name_of(slot.name),
        "kind": slot.kind.value,
        "quantum": format_amount(slot.quantum, slot.kind),
        "exclusive_group": slot.exclusive_group,
        "unit": slot.unit,
    }


def plugin_view(status: PluginStatus) -> PluginView:
    """Return a plugin and its status."""
    return {
        "name": status.name,
        "plugin": status.plugin,
        "state": status.state.value,
        "reason": status.reason,
        "slots": list(status.slots),
    }


def plugin_views(plugins: Plugins) -> list[PluginView]:
    """Return every plugin and its status."""
    return [plugin_view(status) for status in plugins.statuses()]


def event_view(event: Event, split: Split, ledger: Ledger) -> object:
    """Return the payload of an event: the thing in its state at that moment."""
    shown: object = {"reason": str(event.value)}
    match event.kind, event.value:
        case EventKind.KERNEL, Kernel() as kernel:
            shown = kernel_view(kernel, split.inventory)
        case EventKind.KERNEL_REMOVED, Kernel() as kernel:
            shown = {"kernel_id": kernel.kernel_id, "agent_id": kernel.agent_id}
        case EventKind.DEVICE, Device() as device:
            shown = device_view(device, split, ledger)
        case EventKind.DEVICE_REMOVED, Device() as device:
            shown = {"device_name": device.device_id.name, "id": device.device_id.id}
        case EventKind.PLUGIN, PluginStatus() as status:
            shown = plugin_view(status)
        case EventKind.RUNTIME, RuntimeStatus() as runtime:
            shown = runtime_view(runtime)
        case EventKind.AUDIT, Audit() as audit:
            shown = asdict(audit)
            if not audit.via:
                del shown["via"]
        case EventKind.REFUSAL, Refusal() as refusal:
            shown = refusal_view(refusal)
    return shown


def refusal_view(refusal: Refusal) -> RefusalView:
    """Return a refused create."""
    return {
        "at": wire_time(refusal.at) or "",
        "caller": refusal.caller,
        "agent_id": refusal.agent_id,
        "kernel_id": refusal.kernel_id,
        "code": refusal.code,
        "detail": refusal.detail,
    }


def runtime_view(status: RuntimeStatus) -> RuntimeView:
    """Return a runtime and its status."""
    return {"name": status.name, "state": status.state.value, "reason": status.reason}


def node_view(
    node_id: str, default_runtime: str, state: NodeState, devices: NodeDevices, plugins: Plugins
) -> NodeView:
    """Return the node with its parts and warnings."""
    runtimes = {name: runtime_view(status) for name, status in state.runtimes.items()}
    return {
        "id": node_id,
        "version": __version__,
        "runtime": runtimes.pop(default_runtime),
        "other_runtimes": list(runtimes.values()),
        "plugins": plugin_views(plugins),
        "warnings": [
            *devices.warnings,
            *_left_agents(state, devices.split),
            *_ignored(state),
            *(f"kernel {k.kernel_id}: {k.reason}" for k in state if k.state in LIVE and k.reason),
        ],
        "generation": devices.generation,
    }


def _left_agents(state: NodeState, split: Split) -> Iterator[str]:
    """Yield a warning for each agent that is not configured but still holds devices."""
    holding: dict[str, list[str]] = {}
    for kernel_id, held in state.ledger.holdings.items():
        if held.agent_id not in split.partitions and held.allocation.shares:
            holding.setdefault(held.agent_id or "unknown", []).append(kernel_id)
    for agent, kernels in holding.items():
        its = f"its kernels {', '.join(kernels)} still hold devices"
        yield f"agent {agent} was removed from the configuration; {its}"


def check_views(checks: Iterable[Check]) -> list[CheckView]:
    """Return the results of the self-check, rule by rule."""
    return [
        {
            "check": check.rule,
            "promise": check.promise,
            "passed": not check.findings,
            "findings": list(check.findings),
        }
        for check in checks
    ]


def amounts(slots: Iterable[tuple[str, int]], inventory: Inventory) -> dict[str, str]:
    """Return base units as plain decimals for every known slot, zero by default."""
    known = dict(slots)
    return {
        name: format_amount(known.get(name, 0), slot.kind)
        for name, slot in inventory.slot_types.items()
    }


def status_line(node_id: str, state: NodeState, devices: NodeDevices) -> str:
    """Return the node's status in one line: kernels, devices and problems."""
    living = sum(kernel.state in LIVE for kernel in state)
    ended = sum(kernel.state in ENDED for kernel in state)
    found = [
        device for device in devices.inventory.devices if device.device_id.name not in (CPU, MEM)
    ]
    lost = [name for name, status in state.runtimes.items() if status.reason]
    troubles = [
        *(f"runtime {name}: {state.runtimes[name].reason}" for name in lost),
        *devices.warnings,
    ]
    text = f"node {node_id}: {living} kernels, {ended} ended; {len(found)} accelerators"
    return f"{text}; {len(troubles)} troubles, {troubles[0]}" if troubles else text
