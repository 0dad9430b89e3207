"""The choice of agents for a request, and the reasons against the others.

The agents of a few nodes, drawn by chance, are checked against a request. Where fewer of them are
suitable than may be tried, other nodes are drawn until enough are found; where none is, all nodes
are checked. An agent is suitable if there is no reason against it.

Slots that a request leaves out are derived from an agent's capacities (`FleetView.charged`), and
must be free as well.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

import msgspec

from agentd.core.slots import ResourceSlots, SlotReading, read_slots
from agentd.errors import UnsupportedResource
from agentd_fleet.view.fleet_view import FleetNode, FleetView, NodeStatus


class PlacementPolicy(StrEnum):
    """The order in which suitable agents are tried."""

    RANDOM = "random"
    PACK = "pack"


class Constraints(msgspec.Struct, frozen=True):
    """Constraints on the target of a request; None means no constraint.

    An agent must have a device of at least one of `models`.
    """

    nodes: frozenset[str] | None = None
    agents: frozenset[str] | None = None
    labels: Mapping[str, str] = {}
    models: frozenset[str] | None = None


class Candidate(NamedTuple):
    """An agent of a node that has the requested amounts free, according to the view."""

    node_id: str
    agent_id: str


class Unfit(msgspec.Struct, frozen=True):
    """A class of unsuitable agents: the reason, their number and some of their nodes."""

    reason: str
    count: int
    nodes: tuple[str, ...]


MOST_NAMED = 5
NEWER = "newer schema"
"""The class of nodes whose reports this gateway cannot read."""
HIDDEN = {NodeStatus.NEWER: NEWER, NodeStatus.LOST: NodeStatus.LOST.value}
"""Classes of nodes whose agents may be unknown: each node counts once."""

SAMPLES = {PlacementPolicy.RANDOM: 64, PlacementPolicy.PACK: 256}
"""Nodes whose agents are compared at least, by policy."""


def read(view: FleetView, raw: Mapping[str, object]) -> SlotReading:
    """Parse a request's amounts in the fleet's slots.

    Raises:
        UnsupportedResource: it has non-zero amounts of slots that no node ever had.
    """
    try:
        return read_slots(raw, view.slot_types)
    except UnsupportedResource as error:
        raise UnsupportedResource(error.slots, error.known, {}, "this fleet") from None


def candidates(
    view: FleetView,
    request: ResourceSlots,
    constraints: Constraints,
    policy: PlacementPolicy,
    choice: random.Random,
    most: int = 8,
) -> list[Candidate]:
    """Return at most `most` suitable agents in the order in which to try them.

    `random` keeps gateways with slightly outdated views from crowding one node. `pack` leaves whole
    nodes free: it begins with the agent that has the least left over, of the scarcest requested
    slot, then of the other requested ones by name.
    """
    drawn = _drawn(_nodes(view, constraints), choice)
    found = list(_suitable(view, request, constraints, islice(drawn, SAMPLES[policy])))
    further = _suitable(view, request, constraints, drawn)
    found += islice(further, max(0, most - len(found))) if found else further
    if policy is PlacementPolicy.RANDOM:
        choice.shuffle(found)
    else:
        found = _packed(view, request, found)
    return found[:most]


def _drawn(nodes: list[FleetNode], choice: random.Random) -> Iterator[FleetNode]:
    """Yield nodes in random order; the list is used up."""
    while nodes:
        at = int(choice.random() * len(nodes))
        nodes[at], nodes[-1] = nodes[-1], nodes[at]
        yield nodes.pop()


def _suitable(
    view: FleetView, request: ResourceSlots, constraints: Constraints, nodes: Iterable[FleetNode]
) -> Iterator[Candidate]:
    amounts = dict(request).items()
    for node in nodes:
        for agent in _agents(node, constraints):
            free = node.offers[agent].free
            if (
                all(free[name] >= amount for name, amount in amounts)
                and not _why_not(view, node, request)
                and not _why_not_of(view, node, agent, request, constraints.models)
            ):
                yield Candidate(node.node_id, agent)


def _packed(
    view: FleetView, request: ResourceSlots, found: Collection[Candidate]
) -> list[Candidate]:
    """Sort candidates by their free amounts, of the scarcest requested slot first.

    The scarcest slot has the smallest ratio of free to requested amounts over all candidates.
    """
    free = {each: view.nodes[each.node_id].offers[each.agent_id].free for each in found}
    times = {name: sum(slots[name] for slots in free.values()) / request[name] for name in request}
    names = sorted(request, key=lambda name: (times[name], name))
    return sorted(found, key=lambda each: ([free[each][name] for name in names], each))


def unfit(view: FleetView, request: ResourceSlots, constraints: Constraints) -> list[Unfit]:
    """Return why agents cannot serve a request, by class, the largest first."""
    counts: Counter[str] = Counter()
    named: defaultdict[str, set[str]] = defaultdict(set)
    for node in sorted(_nodes(view, constraints), key=lambda node: node.node_id):
        if (hidden := HIDDEN.get(node.status)) and not node.offers:
            counts[hidden] += 1
            if constraints.agents is None and len(named[hidden]) < MOST_NAMED:
                named[hidden].add(node.node_id)
            continue
        why_not = _why_not(view, node, request)
        for agent in _agents(node, constraints):
            reason = why_not or _why_not_of(view, node, agent, request, constraints.models)
            if reason:
                counts[reason] += 1
                if len(nodes := named[reason]) < MOST_NAMED:
                    nodes.add(node.node_id)
    return [
        Unfit(reason, count, tuple(sorted(named[reason]))) for reason, count in counts.most_common()
    ]


def _nodes(view: FleetView, constraints: Constraints) -> list[FleetNode]:
    chosen = view.nodes if constraints.nodes is None else constraints.nodes & view.nodes.keys()
    nodes = [view.nodes[node_id] for node_id in chosen]
    if not constraints.labels:
        return nodes
    return [node for node in nodes if node.has(constraints.labels)]


def _agents(node: FleetNode, constraints: Constraints) -> Collection[str]:
    if constraints.agents is None:
        return node.offers
    return [agent for agent in node.offers if agent in constraints.agents]


def _why_not(view: FleetView, node: FleetNode, request: ResourceSlots) -> str:
    """Return why no agent of a node can serve a request, empty if one can."""
    if node.status is not NodeStatus.READY:
        return node.status.value
    if node.remark:
        return node.remark
    strange = view.conflicts.get(node.node_id, ())
    for name in request:
        if name in strange:
            return "conflicting"
        if name not in node.slot_types or name not in view.slot_types:
            return f"lack {name}"
    return ""


def _why_not_of(
    view: FleetView,
    node: FleetNode,
    agent: str,
    request: ResourceSlots,
    models: frozenset[str] | None,
) -> str:
    """Return why an agent cannot serve a request, the most permanent reason first."""
    offer = node.offers[agent]
    is_full = False
    charged = view.charged(node, agent, request)
    for name in charged:
        if offer.free[name] < charged[name]:
            is_full = True
            if offer.capacity[name] < charged[name]:
                return f"too small for {name}"
    if not _has_model(node, agent, models):
        return f"no device of model {', '.join(sorted(models or ()))}"
    return "full" if is_full else ""


def _has_model(node: FleetNode, agent: str, models: frozenset[str] | None) -> bool:
    return models is None or not models.isdisjoint(node.models.get(agent, ()))
