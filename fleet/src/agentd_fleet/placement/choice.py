"""The choice of agents for a request, and the reasons against the others.

The agents of a few nodes, drawn by chance, are checked against a request. Where fewer of them are
suitable than may be tried, other nodes are drawn until enough are found; where none is, all nodes
are checked. An agent is suitable if there is no reason against it.

Slots that a request leaves out are derived from an agent's capacities
(`FleetView.with_derived_slots`), and must be free as well.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
    has_image: bool | None = None
    """Whether the request has an image: the runtime `docker` requires one, others take none."""


class Candidate(NamedTuple):
    """An agent of a node that has the requested amounts free, according to the view."""

    node_id: str
    agent_id: str


class RejectionClass(msgspec.Struct, frozen=True):
    """A class of unsuitable agents: the reason, their number and some of their nodes."""

    reason: str
    count: int
    nodes: tuple[str, ...]


MAX_NAMED = 5
NEWER_SCHEMA = "newer schema"
"""The class of nodes whose reports this gateway cannot read."""
CORDONED = "cordoned"
"""The class of nodes that an operator cordoned; the operator's reason follows."""
NO_IMAGE, IMAGE_NEEDED = "take no image", "require an image"
"""The classes of nodes whose runtime is not the one that the request needs."""
STATUS_CLASSES = {NodeStatus.NEWER: NEWER_SCHEMA, NodeStatus.LOST: NodeStatus.LOST.value}
"""Classes of nodes whose agents may be unknown: each node counts once."""

SAMPLE_SIZES = {PlacementPolicy.RANDOM: 64, PlacementPolicy.PACK: 256}
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


def choose_candidates(
    view: FleetView,
    requested: ResourceSlots,
    constraints: Constraints,
    policy: PlacementPolicy,
    generator: random.Random,
    limit: int = 8,
    last: Collection[str] = (),
    without: Collection[Candidate] = (),
) -> list[Candidate]:
    """Return at most `limit` suitable agents in the order in which to try them.

    Agents of the nodes in `last` come after all others, those `without` are left out.

    `random` keeps gateways with slightly outdated views from crowding one node. `pack` leaves whole
    nodes free: it begins with the agent that has the least left over, of the scarcest requested
    slot, then of the other requested ones by name.
    """

    def find(nodes: Iterable[FleetNode]) -> Iterator[Candidate]:
        suitable = _find_suitable(view, requested, constraints, nodes)
        return (candidate for candidate in suitable if candidate not in without)

    candidates: list[Candidate] = []
    nodes = _nodes(view, constraints)
    for is_last in (False, True):
        group = [node for node in nodes if (node.node_id in last) is is_last]
        missing = limit - len(candidates)
        if group and missing:
            suitable = _sample(find, policy, generator, group, missing)
            if policy is PlacementPolicy.RANDOM:
                generator.shuffle(suitable)
            else:
                suitable = _sort_packed(view, requested, suitable)
            candidates += suitable[:missing]
    return candidates


def _sample(
    find: Callable[[Iterable[FleetNode]], Iterator[Candidate]],
    policy: PlacementPolicy,
    generator: random.Random,
    nodes: list[FleetNode],
    limit: int,
) -> list[Candidate]:
    """Return suitable agents of a sample of nodes, and of others while they are fewer."""
    random_nodes = _shuffle_lazily(nodes, generator)
    suitable = list(find(islice(random_nodes, SAMPLE_SIZES[policy])))
    further = find(random_nodes)
    suitable += islice(further, max(0, limit - len(suitable))) if suitable else further
    return suitable


def _shuffle_lazily(nodes: list[FleetNode], generator: random.Random) -> Iterator[FleetNode]:
    """Yield nodes in random order; the list is used up."""
    while nodes:
        index = int(generator.random() * len(nodes))
        nodes[index], nodes[-1] = nodes[-1], nodes[index]
        yield nodes.pop()


def _find_suitable(
    view: FleetView, requested: ResourceSlots, constraints: Constraints, nodes: Iterable[FleetNode]
) -> Iterator[Candidate]:
    amounts = dict(requested).items()
    for node in nodes:
        for agent in _agents(node, constraints):
            free = node.offers[agent].free
            if (
                all(free[name] >= amount for name, amount in amounts)
                and not _node_rejection_reason(view, node, requested)
                and not _runtime_rejection_reason(node, constraints)
                and not _agent_rejection_reason(view, node, agent, requested, constraints.models)
            ):
                yield Candidate(node.node_id, agent)


def _sort_packed(
    view: FleetView, requested: ResourceSlots, suitable: Collection[Candidate]
) -> list[Candidate]:
    """Sort candidates by their free amounts, of the scarcest requested slot first.

    The scarcest slot has the smallest ratio of free to requested amounts over all candidates.
    """
    free = {
        candidate: view.nodes[candidate.node_id].offers[candidate.agent_id].free
        for candidate in suitable
    }
    abundance = {
        name: sum(slots[name] for slots in free.values()) / amount
        for name, amount in requested.items()
    }
    names = sorted(requested, key=lambda name: (abundance[name], name))
    return sorted(
        suitable, key=lambda candidate: ([free[candidate][name] for name in names], candidate)
    )


def classify_rejections(
    view: FleetView, requested: ResourceSlots, constraints: Constraints
) -> list[RejectionClass]:
    """Return why agents cannot serve a request, by class, the largest first."""
    counts: Counter[str] = Counter()
    nodes_by_reason: defaultdict[str, set[str]] = defaultdict(set)
    for node in sorted(_nodes(view, constraints), key=lambda node: node.node_id):
        if (reason_unknown := STATUS_CLASSES.get(node.status)) and not node.offers:
            counts[reason_unknown] += 1
            if constraints.agents is None and len(nodes_by_reason[reason_unknown]) < MAX_NAMED:
                nodes_by_reason[reason_unknown].add(node.node_id)
            continue
        node_reason = _node_rejection_reason(view, node, requested) or _runtime_rejection_reason(
            node, constraints
        )
        for agent in _agents(node, constraints):
            reason = node_reason or _agent_rejection_reason(
                view, node, agent, requested, constraints.models
            )
            if reason:
                counts[reason] += 1
                if len(node_ids := nodes_by_reason[reason]) < MAX_NAMED:
                    node_ids.add(node.node_id)
    return [
        RejectionClass(reason, count, tuple(sorted(nodes_by_reason[reason])))
        for reason, count in counts.most_common()
    ]


def _nodes(view: FleetView, constraints: Constraints) -> list[FleetNode]:
    node_ids = view.nodes if constraints.nodes is None else constraints.nodes & view.nodes.keys()
    nodes = [view.nodes[node_id] for node_id in node_ids]
    if not constraints.labels:
        return nodes
    return [node for node in nodes if node.has_labels(constraints.labels)]


def _agents(node: FleetNode, constraints: Constraints) -> Collection[str]:
    if constraints.agents is None:
        return node.offers
    return [agent for agent in node.offers if agent in constraints.agents]


def _node_rejection_reason(view: FleetView, node: FleetNode, requested: ResourceSlots) -> str:
    """Return why no agent of a node can serve a request, empty if one can."""
    if reason := cordon_reason(node):
        return reason
    if node.status is not NodeStatus.READY:
        return node.status.value
    if reason := node.reported_reason:
        return reason
    conflicting = view.conflicts.get(node.node_id, ())
    for name in requested:
        if name in conflicting:
            return "conflicting"
        if name not in node.slot_types or name not in view.slot_types:
            return f"lack {name}"
    return ""


def cordon_reason(node: FleetNode) -> str:
    """Return the class of a cordoned node, empty for another one."""
    return "" if node.cordon is None else f"{CORDONED}: {node.cordon.reason}".removesuffix(": ")


def _runtime_rejection_reason(node: FleetNode, constraints: Constraints) -> str:
    """Return why a node's runtime is not the one for a request, empty if it is or is unknown."""
    runtime, has_image = node.runtime, constraints.has_image
    if runtime is None or has_image is None or has_image is (runtime.name == "docker"):
        return ""
    return NO_IMAGE if has_image else IMAGE_NEEDED


def _agent_rejection_reason(
    view: FleetView,
    node: FleetNode,
    agent: str,
    requested: ResourceSlots,
    models: frozenset[str] | None,
) -> str:
    """Return why an agent cannot serve a request, the most permanent reason first."""
    offer = node.offers[agent]
    is_full = False
    needed = view.with_derived_slots(node, agent, requested)
    for name in needed:
        if offer.free[name] < needed[name]:
            is_full = True
            if offer.capacity[name] < needed[name]:
                return f"too small for {name}"
    if models is not None and models.isdisjoint(node.models.get(agent, ())):
        return f"no device of model {', '.join(sorted(models))}"
    return "full" if is_full else ""
