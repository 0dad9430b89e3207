"""The fleet as one value: its nodes, and the one set of slot types that all requests see.

Slot types accumulate: what any node ever offered is known, also while no node has it, until an
operator forgets it. The first definition of a name stays; a node that means something else by it
is left out for that slot, and for that slot alone. What a node does not offer is zero, and so is
an amount below zero. A view never changes: a request keeps the one that it began with.

What follows from the nodes (conflicts, sums, who has how much of what) stands in tables that the
view after a change takes over from the one before, but for what changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType

from agentd.core.devices import natural_key
from agentd.core.slots import MAX_AMOUNT, ResourceSlots, SlotName, SlotType, derived_amount
from agentd_fleet.view.persistent import AGENT, AgentKey, Layered, Ranking, Row, ranked, reranked


class NodeStatus(StrEnum):
    """How a node does, as far as it is heard of."""

    READY = "ready"
    DAEMON_DOWN = "daemon-down"
    LOST = "lost"
    NEWER = "newer-schema"
    """What it says of itself cannot be read by this gateway, so nothing is placed there."""


NOTHING = ResourceSlots()


@dataclass(frozen=True, slots=True)
class Offer:
    """What an agent of a node has, what of it is free, and what it holds, in base units.

    Agents that share devices each have all of them, and each what is free of them.
    """

    capacity: ResourceSlots
    free: ResourceSlots
    allocated: ResourceSlots = NOTHING

    def differing(self, other: Offer) -> set[SlotName]:
        """Return the slots of which the two have unequal amounts."""
        return (
            self.capacity.differing(other.capacity)
            | self.free.differing(other.free)
            | self.allocated.differing(other.allocated)
        )


@dataclass(frozen=True, slots=True)
class FleetNode:
    """A node as it told of itself last; `offers` and the `models` of the devices by agent.

    `whole` is what all agents together have, each device counted once; None where no two agents
    share one. A `remark` says why nothing is placed on it at all, though it is listed.
    """

    node_id: str
    slot_types: Mapping[SlotName, SlotType]
    offers: Mapping[str, Offer]
    status: NodeStatus = NodeStatus.READY
    url: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    generation: int = 0
    seen_at: float = 0.0
    remark: str = ""
    models: Mapping[str, frozenset[str]] = field(default_factory=dict)
    whole: Offer | None = None

    def is_shaped_as(self, other: FleetNode) -> bool:
        """Tell whether the two differ in amounts at most, for all that the tables say."""
        return (
            (self.status, self.remark) == (other.status, other.remark)
            and self.slot_types == other.slot_types
            and self.offers.keys() == other.offers.keys()
            and (self.whole is None) == (other.whole is None)
        )

    def differing(self, other: FleetNode) -> set[SlotName]:
        """Return the slots of which a node of the same shape has other amounts."""
        pairs = [(offer, other.offers[agent]) for agent, offer in self.offers.items()]
        if self.whole is not None and other.whole is not None:
            pairs.append((self.whole, other.whole))
        return set().union(*(was.differing(now) for was, now in pairs if was is not now))

    @property
    def is_asked(self) -> bool:
        """Whether the node is heard of and can be called."""
        return self.status is NodeStatus.READY and bool(self.url) and not self.remark

    def has(self, labels: Mapping[str, str]) -> bool:
        """Tell whether the node has all of these labels."""
        return all(self.labels.get(key) == value for key, value in labels.items())


@dataclass(frozen=True, slots=True)
class Use:
    """A slot over many nodes, in base units; the sums are exact.

    What is neither allocated nor free cannot be given: it is drained, say.
    """

    capacity: int = 0
    free: int = 0
    allocated: int = 0

    def __add__(self, other: Use) -> Use:
        return Use(
            self.capacity + other.capacity,
            self.free + other.free,
            self.allocated + other.allocated,
        )

    def __sub__(self, other: Use) -> Use:
        return Use(
            self.capacity - other.capacity,
            self.free - other.free,
            self.allocated - other.allocated,
        )


FEW = 4
"""The tables are changed if one node in so many is touched at most, and else made from scratch."""


class FleetTally:
    """What some nodes add to the tables: all of it, or what `agents` or `names` have of it.

    With `names`, rows have the other slots as they are in `rows`.
    """

    def __init__(
        self,
        slot_types: Mapping[SlotName, SlotType],
        nodes: Iterable[FleetNode],
        agents: Iterable[str] | None = None,
        names: AbstractSet[SlotName] | None = None,
        rows: Mapping[AgentKey, Row] = MappingProxyType({}),
    ) -> None:
        self._slot_types = slot_types
        self._agents = None if agents is None else frozenset(agents)
        self._names, self._rows = names, rows
        self.columns = {name: at for at, name in enumerate(sorted(slot_types), AGENT + 1)}
        self.conflicts: dict[str, frozenset[SlotName]] = {}
        self.rows: dict[AgentKey, Row] = {}
        self._nothing: Row = (1, *(0,) * len(self.columns))
        self.sums = [(0, 0, 0)] * len(self._nothing)
        for node in nodes:
            self._add(node)

    def _add(self, node: FleetNode) -> None:
        names = node.slot_types if self._names is None else self._names & node.slot_types.keys()
        strange = _strange(self._slot_types, node, names)
        if strange:
            self.conflicts[node.node_id] = strange
        if node.status is NodeStatus.LOST:
            return
        columns = [
            (name, self.columns[name])
            for name in names
            if name in self.columns and name not in strange
        ]
        takes_more = node.status is NodeStatus.READY and not node.remark
        sums = {at: [0, 0, 0] for _, at in columns}
        for agent, offer in node.offers.items():
            if self._agents is not None and agent not in self._agents:
                continue
            key = node.node_id, agent
            free = [*self._rows.get(key, self._nothing)]
            for name, at in columns:
                free[at] = _told(offer.free[name])
                mine = sums[at]
                mine[0] += _told(offer.capacity[name])
                mine[1] += free[at]
                mine[2] += _told(offer.allocated[name])
            if takes_more:
                self.rows[key] = tuple(free)
        for name, at in columns:
            capacity, left, allocated = sums[at]
            if (whole := node.whole) is not None:
                capacity = min(capacity, _told(whole.capacity[name]))
                left = min(left, _told(whole.free[name]))
            total = self.sums[at]
            self.sums[at] = total[0] + capacity, total[1] + left, total[2] + allocated

    def uses(self) -> dict[SlotName, Use]:
        """Return the sums by slot."""
        return {name: Use(*self.sums[at]) for name, at in self.columns.items()}

    def tables(self) -> Tables:
        """Return the tables of these nodes and no others."""
        rankings = [ranked(self.rows, column) for column in range(len(self._nothing))]
        return Tables(self.columns, self.conflicts, self.uses(), rankings, Layered(self.rows))


@dataclass(frozen=True, eq=False)
class Tables:
    """What follows from nodes: conflicts by node, sums by slot, and who has how much, by column.

    `rows` are those of agents that anything can be placed on. Columns are `AGENT` and then the
    slots, in the order of their names.
    """

    columns: Mapping[SlotName, int]
    conflicts: Mapping[str, frozenset[SlotName]]
    uses: Mapping[SlotName, Use]
    rankings: Sequence[Ranking]
    rows: Layered[AgentKey, Row]

    def changed(self, before: FleetTally, after: FleetTally) -> Tables:
        """Return the tables after some nodes that added the one have come to add the other."""
        conflicts = self.conflicts
        if before.conflicts != after.conflicts:
            kept = {at: names for at, names in conflicts.items() if at not in before.conflicts}
            conflicts = {**kept, **after.conflicts}
        uses = dict(self.uses)
        for name, at in self.columns.items():
            if (was := before.sums[at]) != (now := after.sums[at]):
                uses[name] += Use(*now) - Use(*was)
        rankings = reranked(self.rankings, before.rows, after.rows)
        rows = self.rows.changed(after.rows, before.rows.keys() - after.rows.keys())
        return Tables(self.columns, conflicts, uses, rankings, rows)


@dataclass(frozen=True, eq=False)
class FleetView:
    """All nodes, and what is known of slots, at one revision; compared by identity."""

    revision: int = 0
    slot_types: Mapping[SlotName, SlotType] = field(default_factory=dict)
    nodes: Mapping[str, FleetNode] = field(default_factory=dict)

    def learned(self, node: FleetNode) -> list[SlotType]:
        """Return the slot types of a node that the fleet does not know yet."""
        return [slot for name, slot in node.slot_types.items() if name not in self.slot_types]

    def with_slot_type(self, slot: SlotType, revision: int) -> FleetView:
        """Return the view in which a slot type is known; the first definition of a name stays."""
        if slot.name in self.slot_types:
            return self.changed((), revision=revision)
        return replace(self, slot_types={**self.slot_types, slot.name: slot}, revision=revision)

    def with_slot_types(self, slots: Mapping[SlotName, SlotType], revision: int) -> FleetView:
        """Return the view in which these slot types are known, and no others."""
        if dict(slots) == dict(self.slot_types):
            return self.changed((), revision=revision)
        return replace(self, slot_types=dict(slots), revision=revision)

    def without_slot_type(self, name: SlotName, revision: int) -> FleetView:
        """Return the view in which a slot type is forgotten.

        Raises:
            ValueError: a node offers it, or did before it was lost, or may, being of a newer
                schema; the message names some.
        """
        nodes = self.nodes.values()
        if newer := sorted(node.node_id for node in nodes if node.status is NodeStatus.NEWER):
            shown = ", ".join(newer[:5])
            raise ValueError(
                f"{name} may be offered by {len(newer)} nodes of a newer schema ({shown}); ask a"
                " gateway of their version"
            )
        if offering := sorted(node.node_id for node in nodes if name in node.slot_types):
            shown = ", ".join(offering[:5])
            raise ValueError(f"{name} is offered by {len(offering)} nodes ({shown})")
        kept = {known: slot for known, slot in self.slot_types.items() if known != name}
        return replace(self, slot_types=kept, revision=revision)

    def with_node(self, node: FleetNode, revision: int) -> FleetView:
        """Return the view with a node as it is now."""
        return self.changed([node], revision=revision)

    def without_node(self, node_id: str, revision: int) -> FleetView:
        """Return the view without a node; what it taught of slots stays."""
        return self.changed((), [node_id], revision)

    def changed(
        self, nodes: Iterable[FleetNode], gone: Iterable[str] = (), revision: int | None = None
    ) -> FleetView:
        """Return the view after a batch of changes: some nodes went, then others told.

        Of two reports of one node the later in `nodes` counts. The revision stays if none is given.
        """
        went, told = frozenset(gone), {node.node_id: node for node in nodes}
        nodes_before = self.nodes if isinstance(self.nodes, Layered) else Layered(self.nodes)
        now = nodes_before.changed(told, (went - told.keys()) & self.nodes.keys())
        revision = self.revision if revision is None else revision
        view = replace(self, nodes=now, revision=revision)
        if (len(went) + len(told)) * FEW <= len(now):
            names, rows = None if went else self._differing(told), self.tables.rows
            old = self._heard_of(went | told.keys())
            before, after = (
                FleetTally(
                    self.slot_types, some, names=names, rows=rows if names is not None else {}
                )
                for some in (old, told.values())
            )
            object.__setattr__(view, "tables", self.tables.changed(before, after))
        return view

    def _differing(self, told: Mapping[str, FleetNode]) -> set[SlotName] | None:
        """Return the slots whose amounts change with some reports; None if anything else does."""
        names: set[SlotName] = set()
        for node_id, node in told.items():
            old = self.nodes.get(node_id)
            if old is None or not old.is_shaped_as(node):
                return None
            names |= old.differing(node)
        return names

    def debited(self, node_id: str, agent_id: str, slots: ResourceSlots) -> FleetView:
        """Return the view in which an agent holds so much more, with nothing free below zero.

        It stands for what was just given away until the node's next report, which takes its
        place. The revision stays. An agent that is not in the view any more has nothing to give.
        """
        node = self.nodes.get(node_id)
        if node is None or agent_id not in node.offers:
            return self
        offer = node.offers[agent_id]
        slots = self.charged(node, agent_id, slots)
        offers = {**node.offers, agent_id: _less(offer, slots)}
        whole = None if node.whole is None else _less(node.whole, slots)
        return self.changed([replace(node, offers=offers, whole=whole)])

    @cached_property
    def tables(self) -> Tables:
        """What follows from the nodes: from scratch, if the view before had not enough of it."""
        return FleetTally(self.slot_types, self.nodes.values()).tables()

    def rows(self, nodes: Iterable[str]) -> dict[AgentKey, Row]:
        """Return what is free at the agents of these nodes that anything can be placed on."""
        rows = self.tables.rows
        keys = [(n.node_id, agent) for n in self._heard_of(nodes) for agent in n.offers]
        return {key: rows[key] for key in keys if key in rows}

    @property
    def conflicts(self) -> Mapping[str, frozenset[SlotName]]:
        """The slots by which nodes mean something else than the fleet, by node."""
        return self.tables.conflicts

    def state_of(self, node_id: str) -> str:
        """Return a node's state as it is shown: how it does, or that it is `conflicting`."""
        status = self.nodes[node_id].status
        if status is NodeStatus.READY and node_id in self.conflicts:
            return "conflicting"
        return status.value

    def understood(self, node: FleetNode, slots: ResourceSlots) -> ResourceSlots:
        """Return the amounts that mean the same to a node and to the fleet; the others are zero."""
        strange = _strange(self.slot_types, node, node.slot_types)
        return ResourceSlots(
            {
                name: _told(amount)
                for name, amount in slots.items()
                if name in self.slot_types and name in node.slot_types and name not in strange
            }
        )

    def charged(self, node: FleetNode, agent_id: str, request: ResourceSlots) -> ResourceSlots:
        """Return a request with the slots that it leaves out, in proportion to an agent's capacity.

        The node decides device by device; this is what it charges if its devices are alike.
        """
        families = {self.slot_types[name].family for name in request if name in self.slot_types}
        if not families & self._secondary.keys():
            return request
        capacity = self.understood(node, node.offers[agent_id].capacity)
        amounts = dict(request)
        for primary in sorted(families & self._secondary.keys()):
            slots = (primary, *self._secondary[primary])
            deciding = next(name for name in slots if name in request)
            for name in slots:
                if name not in request and (whole := capacity[name]):
                    quantum, of = self.slot_types[name].quantum, capacity[deciding]
                    amounts[name] = derived_amount(request[deciding], of, whole, quantum)
        return ResourceSlots(amounts)

    @cached_property
    def _secondary(self) -> Mapping[SlotName, Sequence[SlotName]]:
        """The secondary slots that the fleet knows by their primary one, in natural order."""
        found: dict[SlotName, list[SlotName]] = {}
        for name in sorted(self.slot_types, key=natural_key):
            if (primary := self.slot_types[name].primary) is not None:
                found.setdefault(primary, []).append(name)
        return found

    def statistics(
        self,
        nodes: Iterable[str] | None = None,
        *,
        agents: Iterable[str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> dict[SlotName, Use]:
        """Return every known slot over the nodes that are heard of, or some of them.

        A slot that none of them has is zero. Nodes that are lost do not count.
        """
        if nodes is None and agents is None and not labels:
            return dict(self.tables.uses)
        chosen = self.nodes.values() if nodes is None else self._heard_of(set(nodes))
        having = [node for node in chosen if node.has(labels or {})]
        return FleetTally(self.slot_types, having, agents).uses()

    def _heard_of(self, nodes: Iterable[str]) -> list[FleetNode]:
        return [self.nodes[node_id] for node_id in nodes if node_id in self.nodes]


def _less(offer: Offer, slots: ResourceSlots) -> Offer:
    left = {name: max(0, amount - slots[name]) for name, amount in offer.free.items()}
    held = offer.allocated + {name: n for name, n in slots.items() if name in offer.capacity}
    return replace(offer, free=ResourceSlots(left), allocated=held)


def _told(amount: int) -> int:
    """Return an amount as it counts, whatever a node says."""
    return amount if 0 <= amount <= MAX_AMOUNT else min(max(amount, 0), MAX_AMOUNT)


def is_same(one: SlotType, other: SlotType) -> bool:
    """Return whether two nodes mean the same by a slot: its kind, quantum and primary slot."""
    return (one.kind, one.quantum, one.primary) == (other.kind, other.quantum, other.primary)


def _strange(
    slot_types: Mapping[SlotName, SlotType], node: FleetNode, names: Iterable[SlotName]
) -> frozenset[SlotName]:
    """Return those of some slots of a node by which it means something else than the fleet."""
    found = ((name, node.slot_types[name]) for name in names)
    return frozenset(
        name
        for name, slot in found
        if (known := slot_types.get(name, slot)) is not slot and not is_same(slot, known)
    )
