"""The wire types of the gateway: a node's with `node_id`, and the fleet's own."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from agentd.core.slots import SlotName, SlotType, format_amount
from agentd.views import (
    Amount,
    DecisionView,
    DeviceView,
    KernelUseView,
    KernelView,
    SlotTypeView,
    SlotUseView,
)
from agentd_fleet.view.fleet_view import Cordon, FleetNode, FleetView, SlotUsage


class FleetKernelView(KernelView):
    """A kernel on a node of the fleet."""

    node_id: str


class FleetKernelUseView(KernelUseView):
    """The usage of a kernel on a node of the fleet."""

    node_id: str


class UnknownKernelView(TypedDict):
    """A kernel whose node does not answer, as far as the fleet knows it."""

    kernel_id: str
    agent_id: str
    node_id: str
    state: Literal["unknown"]
    created_by: str
    reason: str


class FleetDecisionView(DecisionView):
    """The decision that a create would get now, and its node."""

    node_id: str
    agent_id: str


class FleetDeviceView(DeviceView):
    """A device on a node of the fleet."""

    node_id: str


class CordonView(TypedDict):
    """The reason for which an operator keeps new kernels off a node, who, and since when."""

    reason: str
    by: str
    since: str


class FleetNodeView(TypedDict):
    """A node as last reported; `reason` says what keeps creates from it, besides a cordon."""

    id: str
    state: Literal["ready", "daemon-down", "lost", "conflicting", "newer-schema"]
    url: str
    labels: dict[str, str]
    agents: dict[str, dict[str, SlotUseView]]
    slot_types: list[str]
    conflicting: list[str]
    generation: int
    seen_at: str
    reason: str
    cordon: CordonView | None


class StatsView(TypedDict):
    """Slots of the fleet at one revision, without lost nodes."""

    revision: int
    slots: dict[str, SlotUseView]
    nodes: NotRequired[dict[str, dict[str, SlotUseView]]]


def node_view(view: FleetView, node: FleetNode, agents: frozenset[str] | None) -> FleetNodeView:
    """Return a node as a caller sees it, with the caller's agents."""
    conflicting = view.conflicts.get(node.node_id, frozenset())
    agent_views = {
        agent: usage_views(
            node.slot_types,
            {
                n: SlotUsage(offer.capacity[n], offer.free[n], offer.allocated[n])
                for n in node.slot_types
            },
        )
        for agent, offer in node.offers.items()
        if agents is None or agent in agents
    }
    return {
        "id": node.node_id,
        "state": view.node_state(node.node_id),  # type: ignore[typeddict-item]
        "url": node.url,
        "labels": dict(node.labels),
        "agents": agent_views,
        "slot_types": sorted(node.slot_types),
        "conflicting": sorted(conflicting),
        "generation": node.generation,
        "seen_at": datetime.fromtimestamp(node.seen_at, UTC).isoformat(),
        "reason": node.unusable_reason,
        "cordon": _cordon_view(node.cordon),
    }


def _cordon_view(cordon: Cordon | None) -> CordonView | None:
    if cordon is None:
        return None
    return {"reason": cordon.reason, "by": cordon.by, "since": cordon.since}


def usage_views(
    slot_types: Mapping[SlotName, SlotType], usages: Mapping[SlotName, SlotUsage]
) -> dict[str, SlotUseView]:
    """Return the usage of slots."""
    views: dict[str, SlotUseView] = {}
    for name, usage in usages.items():
        kind = slot_types[name].kind
        views[name] = {
            "capacity": format_amount(usage.capacity, kind),
            "allocated": format_amount(usage.allocated, kind),
            "free": format_amount(usage.free, kind),
        }
    return views


def slot_type_view(slot: SlotType) -> SlotTypeView:
    """Return a slot type in the form of a node's."""
    quantum: Amount = format_amount(slot.quantum, slot.kind)
    return {
        "name": slot.name,
        "device_name": slot.name.partition(".")[0],
        "kind": slot.kind.value,
        "quantum": quantum,
        "exclusive_group": slot.exclusive_group,
        "unit": slot.unit,
        "primary": slot.primary,
    }
