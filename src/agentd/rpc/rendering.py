"""Conversions from the services' values to wire types; no decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
from msgspec.structs import asdict

from agentd import __version__
from agentd.core.allocation.explain import OTHER, ratio_to_primary
from agentd.core.allocation.ledger import (
    Allocation,
    ClaimRef,
    Holder,
    Ledger,
    Share,
    holder_text,
    without_unoffered_slots,
)
from agentd.core.claim.claim import ClaimStatus, Collision, EndedClaim
from agentd.core.conditions import ActiveCondition
from agentd.core.devices import MEMORY, Device, Health, Inventory
from agentd.core.kernel.edits import ContainerEdits
from agentd.core.kernel.states import ENDED, LIVE, Kernel
from agentd.core.partition.split import Partition, Split
from agentd.core.slots import CPU, MEM, SlotType, device_name_of, format_amount, readable_amount
from agentd.events import Audit, Event, EventKind
from agentd.services.engines import EngineStatus
from agentd.services.node import Node
from agentd.services.protocols import Plugins, PluginStatus
from agentd.services.refusals import Refusal
from agentd.services.selfcheck import Check
from agentd.services.state import RuntimeStatus
from agentd.services.statistics import KernelUse
from agentd.views import (
    AgentView,
    CheckView,
    ClaimHolderView,
    ClaimView,
    ConditionView,
    DeviceState,
    DeviceView,
    EditsView,
    EngineView,
    HolderView,
    KernelUseView,
    KernelView,
    LimitView,
    NodeView,
    PluginView,
    RefusalView,
    RuntimeView,
    SlotTypeView,
    SlotUseView,
)

_OPTIONAL = frozenset({"via", "claim_id"})
"""Members of an audit event that are left out where they are empty."""


def kernel_view(kernel: Kernel, inventory: Inventory) -> KernelView:
    """Return a kernel, including its unknown slots and degraded devices."""
    return {
        "kernel_id": kernel.kernel_id,
        "agent_id": kernel.agent_id,
        "state": kernel.state.value,
        "slots": dict(kernel.slots),
        "allocation": charged_allocation(kernel.allocation, inventory).to_wire()
        if kernel.holds_devices
        else {},
        "unknown_slots": _unknown_slots(kernel, inventory) if kernel.holds_devices else {},
        "degraded": _degraded_texts(kernel, inventory) if kernel.holds_devices else [],
        "ports": [
            {"container": p.container, "host": p.host, "protocol": p.protocol, "address": p.address}
            for p in (kernel.ports if kernel.holds_devices else ())
        ],
        "container_id": kernel.handle if kernel.runtime == "docker" else None,
        "pid": kernel.pid,
        "unit": kernel.unit,
        "created_at": format_time(kernel.created_at) or "",
        "started_at": format_time(kernel.started_at),
        "finished_at": format_time(kernel.ending.finished_at),
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
        "claim_id": kernel.claim_id,
    }


def claim_view(status: ClaimStatus, inventory: Inventory) -> ClaimView:
    """Return a claim as it is now."""
    claim = status.claim
    holder = msgspec.to_builtins(claim.holder)
    del holder["type"]
    holder.pop("inode", None)
    view: ClaimView = {
        "claim_id": claim.claim_id,
        "agent_id": claim.agent_id,
        "state": status.state,
        "slots": dict(claim.slots),
        "allocation": charged_allocation(claim.allocation, inventory).to_wire(),
        "edits": edits_view(claim.edits),
        "holder": holder,
        "labels": dict(claim.labels),
        "created_at": format_time(claim.created_at) or "",
        "expires_at": format_time(status.expires_at),
        "created_by": claim.created_by,
    }
    if claim.unreadable_reason:
        view["reason"] = claim.unreadable_reason
    return view


def edits_view(edits: ContainerEdits) -> EditsView:
    """Return the edits for the devices of claims."""
    view: EditsView = msgspec.to_builtins(edits)
    return view


def usage_view(usage: KernelUse) -> KernelUseView:
    """Return the usage of a kernel."""
    ids = {"kernel_id": usage.kernel_id, "agent_id": usage.agent_id, "state": usage.state.value}
    devices = [{**asdict(device), "share": format(device.share, "f")} for device in usage.devices]
    view = {**ids, "at": format_time(usage.at), **asdict(usage.usage), "devices": devices}
    return cast("KernelUseView", view)


def engine_view(status: EngineStatus) -> EngineView:
    """Return an engine and the devices that wait for it."""
    devices = {name: list(ids) for name, ids in status.devices.items()}
    return {"engine": status.engine, "ready": status.is_ready, "devices": devices}


def _collision_view(collision: Collision, ledger: Ledger) -> Mapping[str, object]:
    shares = ledger.holders(collision.device_id)
    return {
        "device_name": collision.device_id.name,
        "id": collision.device_id.id,
        "holders": [
            _holder_view(holder, shares[holder], is_visible=True)
            for holder in collision.holders
            if holder in shares
        ],
    }


def charged_allocation(allocation: Allocation, inventory: Inventory) -> Allocation:
    """Return the part of an allocation that is charged now."""
    return Allocation(
        tuple(
            without_unoffered_slots(share, device, inventory)
            if (device := inventory.by_id.get(share.device_id))
            else share
            for share in allocation.shares
        )
    )


def _unknown_slots(kernel: Kernel, inventory: Inventory) -> dict[str, str]:
    """Return the slots of a kernel that are not charged: unknown, or not offered by its devices."""
    slots = {
        name: amount for name, amount in kernel.slots.items() if name not in inventory.slot_types
    }
    sums: dict[str, int] = {}
    for share in kernel.allocation.shares:
        device = inventory.by_id.get(share.device_id)
        offered = device.slot_names if device else share.slot_names
        for slot, kind, amount in share.secondary:
            if slot not in offered:
                sums[slot] = sums.get(slot, 0) + amount
                slots[slot] = format_amount(sums[slot], kind)
    return slots


def _degraded_texts(kernel: Kernel, inventory: Inventory) -> list[str]:
    ids = dict.fromkeys(share.device_id for share in kernel.allocation.shares)
    devices = (inventory.by_id[device_id] for device_id in ids if device_id in inventory.by_id)
    broken = [
        f"{device.device_id}: {'gone' if device.gone else 'unhealthy'}: {device.reason}"
        for device in devices
        if (device.gone and device.health is not Health.UNKNOWN)
        or device.health is Health.UNHEALTHY
    ]
    return [*kernel.degraded, *broken]


def format_time(seconds: float | None) -> str | None:
    """Convert epoch seconds to RFC 3339 in UTC."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def device_view(
    device: Device,
    split: Split,
    ledger: Ledger,
    is_visible: Callable[[Holder], bool] = lambda _: True,
) -> DeviceView:
    """Return a device with its holders and its gravest state.

    A holder that is not visible is shown as `other`. The reason of a device that works names the
    holders of agents that do not have the device any more.
    """
    holders = ledger.holders(device.device_id)
    state, reason = _device_state(device, ledger, is_visible)
    agents = split.owners(device.device_id)
    if not agents and not reason:
        is_reserved = device.device_id.name == CPU and device.device_id.id in split.reserved_cpu
        reason = "reserved for the system" if is_reserved else "assigned to no agent"
    elif state == "ok" and device.device_id != MEMORY:
        reason = ", ".join(
            _foreign_text(
                holder, share, ledger.holdings[holder].agent_id, is_visible=is_visible(holder)
            )
            for holder, share in holders.items()
            if ledger.holdings[holder].agent_id not in agents
        )
    slots = _device_slots(device, [split.partitions[agent] for agent in agents], ledger)
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
        "free": slots[device.slot]["free"],
        "slots": slots,
        "holders": [
            _holder_view(holder, share, is_visible=is_visible(holder))
            for holder, share in holders.items()
        ],
        "files": [] if device.gone else list(device.files),
    }


def _device_slots(
    device: Device, partitions: Sequence[Partition], ledger: Ledger
) -> dict[str, SlotUseView]:
    """Return each slot of a device; an amount that is free for several agents counts once."""
    free_amounts = [ledger.free_amounts(device, partition) for partition in partitions]
    slots: dict[str, SlotUseView] = {}
    for index, offer in enumerate(device.slots):
        used = ledger.used(device.device_id, offer.slot)
        free = min(sum(part[index] for part in free_amounts), offer.capacity - used)
        slots[offer.slot] = {
            "capacity": format_amount(offer.capacity, offer.kind),
            "allocated": format_amount(used, offer.kind),
            "free": format_amount(max(0, free), offer.kind),
        }
    return slots


def _holder_view(holder: Holder, share: Share, *, is_visible: bool) -> HolderView | ClaimHolderView:
    amount = format_amount(share.amount, share.kind)
    amounts = {slot: format_amount(value, kind) for slot, kind, value in share.amounts if slot}
    if isinstance(holder, ClaimRef):
        claim_id = holder.claim_id if is_visible else OTHER
        return {"claim_id": claim_id, "amount": amount, "amounts": amounts}
    return {"kernel_id": holder if is_visible else OTHER, "amount": amount, "amounts": amounts}


def _device_state(  # noqa: PLR0911 - one line for each state, the gravest first
    device: Device, ledger: Ledger, is_visible: Callable[[Holder], bool]
) -> tuple[DeviceState, str]:
    if device.gone:
        return "gone", device.reason
    if device.health is Health.UNHEALTHY and not device.is_excluded:
        return "unhealthy", device.reason
    if reason := device.withheld_reason:
        return "withheld", reason
    if device.awaited:
        return "withheld", f"until engine {device.awaited} is ready"
    if holders := ledger.whole_device_holders(device):
        shares = ledger.holders(device.device_id)
        texts = [
            _held_text(holder, shares[holder], is_visible=is_visible(holder)) for holder in holders
        ]
        until = "it ends" if len(texts) == 1 else "they end"
        return "held", f"{', '.join(texts)}; unavailable until {until}"
    if excess := ledger.excess(device):
        kinds = {offer.slot: offer.kind for offer in device.slots}
        excesses = [
            readable_amount(amount, kinds[slot]) + (f" of {slot}" if device.secondary else "")
            for slot, amount in excess.items()
        ]
        return "overcommitted", f"over-allocated by {', '.join(excesses)}"
    if device.busy:
        return "busy", device.busy
    if device.drained:
        return "drained", "drained by an operator"
    return "ok", ""


def _holder_text(holder: Holder, *, is_visible: bool) -> str:
    other = f"{'claim' if isinstance(holder, ClaimRef) else 'kernel'} {OTHER}"
    return holder_text(holder) if is_visible else other


def _held_text(holder: Holder, share: Share, *, is_visible: bool) -> str:
    slots = " and ".join(share.slot_names)
    held = f"{slots} of it" if slots else "it, or what it is a part of"
    return f"{_holder_text(holder, is_visible=is_visible)} holds {held}"


def _foreign_text(holder: Holder, share: Share, agent_id: str, *, is_visible: bool) -> str:
    """Return who holds what of a device that another agent has now."""
    amounts = [
        readable_amount(amount, kind) + (f" of {slot}" if len(share.amounts) > 1 else "")
        for slot, kind, amount in share.amounts
    ]
    agent = f" of agent {agent_id or 'unknown'}" if is_visible else ""
    return f"{_holder_text(holder, is_visible=is_visible)}{agent} holds {' and '.join(amounts)}"


def agent_view(agent_id: str, split: Split, ledger: Ledger) -> AgentView:
    """Return an agent's partition and the usage of its slots."""
    factors = split.scaling_factors(agent_id)
    return {
        "agent_id": agent_id,
        "devices": device_ids_by_name(split, agent_id),
        "slots": {
            name: _slot_use_view(agent_id, slot, split, ledger)
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
            "held": format_amount(ledger.agent_limit_usage(agent_id, name), limit.kind),
            "guaranteed": name in split.guaranteed,
        }
        for name, limit in split.partitions[agent_id].limits.items()
    }


def device_ids_by_name(split: Split, agent_id: str) -> dict[str, list[str]]:
    """Return the ids of an agent's devices by device name, without memory."""
    names: dict[str, list[str]] = {name: [] for name in split.inventory.by_name if name != MEM}
    for device_id in split.partitions[agent_id].devices:
        if device_id.name != MEM:
            names[device_id.name].append(device_id.id)
    return names


def _slot_use_view(agent_id: str, slot: SlotType, split: Split, ledger: Ledger) -> SlotUseView:
    partition, inventory = split.partitions[agent_id], split.inventory
    devices = inventory.by_slot.get(slot.name, ())
    offering = None if slot.primary is None else {device.device_id for device in devices}
    allocated = sum(
        share.amount_of(slot.name)
        for holding in ledger.holdings.values()
        if holding.agent_id == agent_id
        for share in holding.allocation.shares
        if offering is None or share.device_id in offering  # else it is not charged
    )
    free = sum(ledger.free(d, partition, slot.name) // slot.quantum * slot.quantum for d in devices)
    if (remaining := ledger.limit_headroom(partition, device_name_of(slot.name))) is not None:
        within_limit = int(remaining * ratio_to_primary(slot.name, devices, inventory))
        free = min(free, within_limit // slot.quantum * slot.quantum)
    capacity = split.agent_slots(agent_id)[slot.name]
    if slot.primary is not None:  # whole steps on each device, as in `free`
        capacity = sum(
            partition.slot_limits(d)[d.slot_names.index(slot.name)] // slot.quantum * slot.quantum
            for d in devices
        )
    return {
        "capacity": format_amount(capacity, slot.kind),
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
        "primary": slot.primary,
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


def refusal_view(refusal: Refusal) -> RefusalView:
    """Return a refused create."""
    return {
        "at": format_time(refusal.at) or "",
        "caller": refusal.caller,
        "agent_id": refusal.agent_id,
        "kernel_id": refusal.kernel_id,
        "claim_id": refusal.claim_id,
        "code": refusal.code,
        "detail": refusal.detail,
    }


def runtime_view(status: RuntimeStatus) -> RuntimeView:
    """Return a runtime and its status."""
    return {"name": status.name, "state": status.state.value, "reason": status.reason}


def condition_view(item: ActiveCondition) -> ConditionView:
    """Return a condition, and since when it holds."""
    condition = item.condition
    return {
        "about": condition.about,
        "reason": condition.reason,
        "remedy": condition.remedy,
        "since": format_time(item.since) or "",
    }


_SIMPLE_VIEWS: Mapping[type, Callable[[Any], object]] = {
    PluginStatus: plugin_view,
    RuntimeStatus: runtime_view,
    Refusal: refusal_view,
    ActiveCondition: condition_view,
}
"""By type of an event's value, the views that need nothing else."""


def event_view(event: Event, split: Split, ledger: Ledger) -> object:
    """Return the payload of an event: the thing in its state at that moment."""
    view = _SIMPLE_VIEWS.get(type(event.value), lambda value: {"reason": str(value)})
    content: object = view(event.value)
    match event.kind, event.value:
        case EventKind.KERNEL, Kernel() as kernel:
            content = kernel_view(kernel, split.inventory)
        case EventKind.KERNEL_REMOVED, Kernel() as kernel:
            content = {"kernel_id": kernel.kernel_id, "agent_id": kernel.agent_id}
        case _, ClaimStatus() as status:
            content = claim_view(status, split.inventory)
        case _, EndedClaim(claim, reason):
            ids = {"claim_id": claim.claim_id, "agent_id": claim.agent_id}
            content = {**ids, "reason": reason.value}
        case _, Collision() as collision:
            content = _collision_view(collision, ledger)
        case EventKind.DEVICE, Device() as device:
            content = device_view(device, split, ledger)
        case EventKind.DEVICE_REMOVED, Device() as device:
            content = {"device_name": device.device_id.name, "id": device.device_id.id}
        case EventKind.CONDITION_REMOVED, ActiveCondition(condition):
            content = {"about": condition.about, "reason": condition.reason}
        case EventKind.AUDIT, Audit() as audit:
            members = asdict(audit).items()
            content = {name: text for name, text in members if text or name not in _OPTIONAL}
    return content


def node_view(
    node_id: str,
    default_runtime: str,
    node: Node,
    plugins: Plugins,
    conditions: Sequence[ActiveCondition],
) -> NodeView:
    """Return the node with its parts and the conditions."""
    runtimes = {name: runtime_view(status) for name, status in node.state.runtimes.items()}
    return {
        "id": node_id,
        "version": __version__,
        "runtime": runtimes.pop(default_runtime),
        "other_runtimes": list(runtimes.values()),
        "plugins": [plugin_view(status) for status in plugins.statuses()],
        "warnings": [str(item.condition) for item in conditions],
        "conditions": [condition_view(item) for item in conditions],
        "generation": node.devices.generation,
    }


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


def format_amounts(slots: Iterable[tuple[str, int]], inventory: Inventory) -> dict[str, str]:
    """Return base units as plain decimals for every known slot, zero by default."""
    amount_by_slot = dict(slots)
    return {
        name: format_amount(amount_by_slot.get(name, 0), slot.kind)
        for name, slot in inventory.slot_types.items()
    }


def status_line(node_id: str, node: Node, conditions: Sequence[ActiveCondition]) -> str:
    """Return the node's status in one line: kernels, devices and conditions."""
    state, devices = node.state, node.devices
    living = sum(kernel.state in LIVE for kernel in state)
    ended = sum(kernel.state in ENDED for kernel in state)
    accelerators = [
        device for device in devices.inventory.devices if device.device_id.name not in (CPU, MEM)
    ]
    text = f"node {node_id}: {living} kernels, {ended} ended; {len(accelerators)} accelerators"
    if not conditions:
        return text
    return f"{text}; {len(conditions)} troubles, {conditions[0].condition}"
