"""The choice of agents for a request, and the reasons against the others.

1. The scarcest requested slot is the one that the fewest agents have enough of.
2. Only those agents are considered: in random order, or from the least free amount upwards.
3. The first few that also have the other slots, and that the constraints allow, are chosen.

Slots that a request leaves out are derived from an agent's capacities (`FleetView.charged`), and
must be free as well.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby, islice
from operator import itemgetter
from typing import NamedTuple

from agentd.core.slots import ResourceSlots, SlotName, SlotReading, SlotType, read_slots
from agentd.errors import UnsupportedResource
from agentd_fleet.view.fleet_view import FleetNode, FleetView, NodeStatus
from agentd_fleet.view.persistent import AGENT, AgentKey, Place, Ranking, Row, ranked


class PlacementPolicy(StrEnum):
    """The order in which suitable agents are tried."""

    RANDOM = "random"
    PACK = "pack"


@dataclass(frozen=True, slots=True)
class Constraints:
    """Constraints on the target of a request; None means no constraint.

    An agent must have a device of at least one of `models`.
    """

    nodes: frozenset[str] | None = None
    agents: frozenset[str] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    models: frozenset[str] | None = None


class Candidate(NamedTuple):
    """An agent of a node that has the requested amounts free, according to the view."""

    node_id: str
    agent_id: str


@dataclass(frozen=True, slots=True)
class Unfit:
    """A class of unsuitable agents: the reason, their number and some of their nodes."""

    reason: str
    count: int
    nodes: tuple[str, ...]


MOST_NAMED = 5
NEWER = "newer schema"
"""The class of nodes whose reports this gateway cannot read."""
HIDDEN = {NodeStatus.NEWER: NEWER, NodeStatus.LOST: NodeStatus.LOST.value}
"""Classes of nodes whose agents may be unknown: each node counts once."""

TIES = 32
"""Agents with equal amounts of a slot that `pack` compares by their other amounts."""

FEW_NODES = 128
"""If a request names at most this many nodes, they are considered one by one."""


def asked(view: FleetView, raw: Mapping[str, object]) -> ResourceSlots:
    """Return a request's amounts in the fleet's slots.

    Raises:
        UnsupportedResource: it has non-zero amounts of slots that no node ever had.
        InvalidSlotAmount, InvalidSlotCombination: see `SlotReading.accepted`.
    """
    return read(view, raw).accepted()


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

    `random` chooses uniformly, which keeps gateways with slightly outdated views from crowding one
    node. `pack` chooses those with the least left over, which leaves whole nodes free: of the
    scarcest requested slot, then of all slots by name, then by ids. Of agents with equal amounts of
    the scarcest slot, `TIES` are compared.
    """
    columns = view.tables.columns
    if not all(name in columns for name in request):
        return []
    asks = [(columns[name], amount) for name, amount in request.items()] or [(AGENT, 1)]
    column, amount = min(asks, key=lambda ask: _having(view.tables.rankings[ask[0]], ask[1]))
    ranking = view.tables.rankings[column]
    if constraints.nodes is not None and len(constraints.nodes) <= FEW_NODES:
        ranking = ranked(view.rows(constraints.nodes), column)
    first, rows = ranking.first_with(amount), view.tables.rows
    is_allowed = _allowed(view, constraints)

    def fits(key: AgentKey) -> bool:
        row = rows[key]
        return all(row[at] >= least for at, least in asks) and is_allowed(*key) and has_room(*key)

    def has_room(node_id: str, agent_id: str) -> bool:
        charged = view.charged(view.nodes[node_id], agent_id, request)
        row = rows[node_id, agent_id]
        return charged is request or all(row[columns[name]] >= n for name, n in charged.items())

    if policy is PlacementPolicy.RANDOM:
        found: Iterator[AgentKey] = filter(fits, (key for _, key in _drawn(ranking, first, choice)))
    elif column == AGENT:
        found = filter(fits, (key for _, key in ranking.upwards(first)))
    else:
        found = _packed(ranking.upwards(first), fits, rows)
    return [Candidate(*key) for key in islice(found, most)]


def _packed(
    places: Iterator[Place], fits: Callable[[AgentKey], bool], rows: Mapping[AgentKey, Row]
) -> Iterator[AgentKey]:
    """Yield the suitable agents in the order of their places; equal ones by all free amounts."""
    for _, equal in groupby(places, key=itemgetter(0)):
        fitting = filter(fits, (key for _, key in equal))
        yield from sorted(islice(fitting, TIES), key=lambda key: (rows[key], key))
        yield from fitting


def _having(ranking: Ranking, amount: int) -> int:
    return len(ranking) - ranking.first_with(amount)


def _drawn(ranking: Ranking, first: int, choice: random.Random) -> Iterator[Place]:
    """Yield the places from a position on in random order, each once.

    It is a partial shuffle: a position taken from the middle is filled with the last place.
    """
    moved: dict[int, int] = {}
    for end in range(len(ranking) - 1, first - 1, -1):
        position = choice.randint(first, end)
        yield ranking[moved.get(position, position)]
        moved[position] = moved.get(end, end)


def _allowed(view: FleetView, wanted: Constraints) -> Callable[[str, str], bool]:
    def is_allowed(node_id: str, agent_id: str) -> bool:
        if wanted.nodes is not None and node_id not in wanted.nodes:
            return False
        if wanted.agents is not None and agent_id not in wanted.agents:
            return False
        node = view.nodes[node_id]
        return node.has(wanted.labels) and _has_model(node, agent_id, wanted.models)

    return is_allowed


def unfit(view: FleetView, request: ResourceSlots, constraints: Constraints) -> list[Unfit]:
    """Return why agents cannot serve a request, by class, the largest first."""
    counts: Counter[str] = Counter()
    named: defaultdict[str, set[str]] = defaultdict(set)
    asks, conflicts = list(request.items()), view.conflicts
    for node in _nodes(view, constraints):
        if (hidden := HIDDEN.get(node.status)) and not node.offers:
            counts[hidden] += 1
            if constraints.agents is None and len(named[hidden]) < MOST_NAMED:
                named[hidden].add(node.node_id)
            continue
        why_not = _why_not(node, asks, conflicts.get(node.node_id, frozenset()), view.slot_types)
        for agent in _agents(node, constraints):
            charged = () if why_not else view.charged(node, agent, request).items()
            if reason := why_not or _why_not_of(node, agent, charged, constraints.models):
                counts[reason] += 1
                if len(nodes := named[reason]) < MOST_NAMED:
                    nodes.add(node.node_id)
    return [
        Unfit(reason, count, tuple(sorted(named[reason]))) for reason, count in counts.most_common()
    ]


def _nodes(view: FleetView, constraints: Constraints) -> list[FleetNode]:
    chosen = view.nodes if constraints.nodes is None else constraints.nodes & view.nodes.keys()
    nodes = [view.nodes[node_id] for node_id in sorted(chosen)]
    if not constraints.labels:
        return nodes
    return [node for node in nodes if node.has(constraints.labels)]


def _agents(node: FleetNode, constraints: Constraints) -> Collection[str]:
    if constraints.agents is None:
        return node.offers
    return [agent for agent in node.offers if agent in constraints.agents]


def _why_not(
    node: FleetNode,
    asks: Sequence[tuple[SlotName, int]],
    strange: frozenset[SlotName],
    known: Mapping[SlotName, SlotType],
) -> str:
    """Return why no agent of a node can serve a request, empty if one can."""
    if node.status is not NodeStatus.READY:
        return node.status.value
    if node.remark:
        return node.remark
    for name, _ in asks:
        if name in strange:
            return "conflicting"
        if name not in node.slot_types or name not in known:
            return f"lack {name}"
    return ""


def _why_not_of(
    node: FleetNode,
    agent: str,
    asks: Iterable[tuple[SlotName, int]],
    models: frozenset[str] | None,
) -> str:
    """Return why an agent cannot serve a request, the most permanent reason first."""
    offer = node.offers[agent]
    is_full = False
    for name, amount in asks:
        if offer.free[name] < amount:
            is_full = True
            if offer.capacity[name] < amount:
                return f"too small for {name}"
    if not _has_model(node, agent, models):
        return f"no device of model {', '.join(sorted(models or ()))}"
    return "full" if is_full else ""


def _has_model(node: FleetNode, agent: str, models: frozenset[str] | None) -> bool:
    return models is None or not models.isdisjoint(node.models.get(agent, ()))
