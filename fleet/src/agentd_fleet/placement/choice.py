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
from enum import StrEnum, auto
from itertools import islice
from typing import NamedTuple

import msgspec

from agentd.core.slots import ResourceSlots, SlotReading, read_slots
from agentd.errors import NodeUnavailable, UnsupportedResource
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


class RejectionKind(StrEnum):
    """The meaning of a class of unsuitable agents for the request."""

    ABSENT = auto()
    """Their nodes take no kernel now, which says nothing about the fleet's resources."""
    UNFIT = auto()
    """Their runtime is not the one that the request needs."""
    LACKING = auto()
    """They lack resources."""


class RejectionClass(msgspec.Struct, frozen=True):
    """A class of unsuitable agents: the reason, their number and some of their nodes."""

    reason: str
    count: int
    nodes: tuple[str, ...]
    kind: RejectionKind = RejectionKind.LACKING


MAX_NAMED = 5
STATUS_REASONS = {NodeStatus.READY: "", NodeStatus.NEWER: "newer schema"}
"""Reasons against nodes by status, where they are not the status itself."""
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
                and not _reject_node(view, node, requested, constraints)
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
    counts: Counter[tuple[str, RejectionKind]] = Counter()
    named: defaultdict[tuple[str, RejectionKind], set[str]] = defaultdict(set)
    for node in sorted(_nodes(view, constraints), key=lambda node: node.node_id):
        node_rejection = _reject_node(view, node, requested, constraints)
        is_unknown = node.status in (NodeStatus.NEWER, NodeStatus.LOST) and not node.offers
        for agent in (
            [""] if is_unknown else _agents(node, constraints)
        ):  # unknown agents count once
            rejection = node_rejection or (
                _agent_rejection_reason(view, node, agent, requested, constraints.models),
                RejectionKind.LACKING,
            )
            if rejection[0]:
                counts[rejection] += 1
                is_named = constraints.agents is None or not is_unknown
                if is_named and len(named[rejection]) < MAX_NAMED:
                    named[rejection].add(node.node_id)
    return [
        RejectionClass(reason, count, tuple(sorted(named[reason, kind])), kind)
        for (reason, kind), count in counts.most_common()
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


def _reject_node(
    view: FleetView, node: FleetNode, requested: ResourceSlots, constraints: Constraints
) -> tuple[str, RejectionKind] | None:
    """Return why no agent of a node can serve a request, and the kind; None if one can."""
    status = STATUS_REASONS.get(node.status, node.status.value)
    if reason := cordon_reason(node) or status or node.reported_reason:
        return reason, RejectionKind.ABSENT
    conflicting = view.conflicts.get(node.node_id, ())
    for name in requested:
        if name in conflicting:
            return "conflicting", RejectionKind.LACKING
        if name not in node.slot_types or name not in view.slot_types:
            return f"lack {name}", RejectionKind.LACKING
    runtime, has_image = node.runtime, constraints.has_image
    if runtime is None or has_image is None or has_image is (runtime.name == "docker"):
        return None
    reason = "take no image" if has_image else "require an image"
    return reason, RejectionKind.UNFIT


def cordon_reason(node: FleetNode) -> str:
    """Return the class of a cordoned node, with the operator's reason; empty for another one."""
    return "" if node.cordon is None else f"cordoned: {node.cordon.reason}".removesuffix(": ")


class NodeCordoned(NodeUnavailable):
    """A node was cordoned after the request took its view; `reason` is its class."""

    def __init__(self, node: FleetNode) -> None:
        self.reason = cordon_reason(node)
        super().__init__(f"node {node.node_id} is {self.reason}")


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
