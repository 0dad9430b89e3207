"""Where a request may go: the agents of all nodes that can give it, and why the others cannot."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from agentd.core.slots import ResourceSlots, parse_slots
from agentd_fleet.view import FleetNode, FleetView, NodeStatus, Offer


class Policy(StrEnum):
    """Which of those that can give a request is asked first."""

    RANDOM = "random"
    PACK = "pack"


@dataclass(frozen=True, slots=True)
class Constraints:
    """Where a request may go at all; None means everywhere."""

    nodes: frozenset[str] | None = None
    agents: frozenset[str] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


class Candidate(NamedTuple):
    """An agent of a node that has what is asked for free, as far as the view tells."""

    node_id: str
    agent_id: str


class Unfit(NamedTuple):
    """A class of nodes' agents that cannot give a request, and some of their nodes."""

    reason: str
    agents: int
    nodes: tuple[str, ...]


MOST_NAMED = 5


def asked(view: FleetView, raw: Mapping[str, object]) -> ResourceSlots:
    """Return a request's amounts in the fleet's slots.

    Raises:
        UnsupportedResource: it names slots that no node ever had, with amounts that are not zero.
        InvalidSlotAmount, InvalidSlotCombination: see `agentd.core.slots.parse_slots`.
    """
    return parse_slots(raw, view.slot_types)


def candidates(
    view: FleetView,
    request: ResourceSlots,
    constraints: Constraints,
    policy: Policy,
    choice: random.Random,
) -> list[Candidate]:
    """Return the agents that can give a request, the first to be asked first.

    `random` among them keeps gateways, whose views are all a little old, from herding to the same
    node; `pack` asks the one with least left over first, and leaves whole nodes free.
    """
    fitting = [
        (node, agent, offer)
        for node, agent, offer in _offers(view, constraints)
        if not _why_not(view, node, offer, request)
    ]
    choice.shuffle(fitting)
    if policy is Policy.PACK:
        fitting.sort(key=lambda found: _left_over(found[2], request))
    return [Candidate(node.node_id, agent) for node, agent, _ in fitting]


def unfit(view: FleetView, request: ResourceSlots, constraints: Constraints) -> list[Unfit]:
    """Return why agents cannot give a request, by class, the largest first."""
    counts: Counter[str] = Counter()
    named: dict[str, list[str]] = {}
    for node, _, offer in _offers(view, constraints):
        if reason := _why_not(view, node, offer, request):
            counts[reason] += 1
            nodes = named.setdefault(reason, [])
            if len(nodes) < MOST_NAMED and node.node_id not in nodes:
                nodes.append(node.node_id)
    return [Unfit(reason, count, tuple(named[reason])) for reason, count in counts.most_common()]


def _offers(view: FleetView, constraints: Constraints) -> Iterator[tuple[FleetNode, str, Offer]]:
    for node_id in sorted(_chosen(view.nodes, constraints.nodes)):
        node = view.nodes[node_id]
        if not node.has(constraints.labels):
            continue
        for agent, offer in node.offers.items():
            if constraints.agents is None or agent in constraints.agents:
                yield node, agent, offer


def _chosen(nodes: Iterable[str], wanted: frozenset[str] | None) -> Iterable[str]:
    return nodes if wanted is None else wanted.intersection(nodes)


def _why_not(view: FleetView, node: FleetNode, offer: Offer, request: ResourceSlots) -> str:
    """Return why an agent cannot give a request, the reason that lasts longest first."""
    if node.status is not NodeStatus.READY:
        return node.status.value
    strange = view.conflicts.get(node.node_id, frozenset())
    for name, amount in request.items():
        if not amount:
            continue
        if name in strange:
            return f"conflicting: {name}"
        if name not in node.slot_types:
            return f"lacks {name}"
        if offer.capacity[name] < amount:
            return f"has less than {name} asks for"
    return "" if request <= offer.free else "full"


def _left_over(offer: Offer, request: ResourceSlots) -> tuple[int, ...]:
    """Return what stays free of each slot that is asked for, in a fixed order."""
    return tuple(offer.free[name] - amount for name, amount in sorted(request.items()) if amount)
