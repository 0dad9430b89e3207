"""The fleet as one value: its nodes, and one set of slot types for all requests.

Slot types accumulate: a type that any node ever offered stays until an operator forgets it. The
first definition of a name stays; a node with a different definition is excluded for that slot only.
An amount that a node does not offer is zero, and so is a negative one. A view is immutable: a
request keeps the one that it began with.

Derived data (conflicts, sums, rankings) is kept in tables, which a view takes over from the
previous one except for the changes.
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
    """The status of a node according to its reports."""

    READY = "ready"
    DAEMON_DOWN = "daemon-down"
    LOST = "lost"
    NEWER = "newer-schema"
    """This gateway cannot read the node's report, so no kernel is placed there."""


NOTHING = ResourceSlots()


@dataclass(frozen=True, slots=True)
class Offer:
    """The amounts of an agent in base units: capacity, free and allocated.

    Agents that share devices each count all of them, and all of their free amounts.
    """

    capacity: ResourceSlots
    free: ResourceSlots
    allocated: ResourceSlots = NOTHING

    def differing(self, other: Offer) -> set[SlotName]:
        """Return the slots in which the two differ."""
        return (
            self.capacity.differing(other.capacity)
            | self.free.differing(other.free)
            | self.allocated.differing(other.allocated)
        )


@dataclass(frozen=True, slots=True)
class FleetNode:
    """A node as last reported; `offers` and the `models` of devices by agent.

    `whole` is the total of all agents, each device counted once; None if no two agents share one. A
    `remark` is the reason why no kernel is placed on the node, although it is listed.
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
        """Return whether the two differ only in amounts, as far as the tables are concerned."""
        return (
            (self.status, self.remark) == (other.status, other.remark)
            and self.slot_types == other.slot_types
            and self.offers.keys() == other.offers.keys()
            and (self.whole is None) == (other.whole is None)
        )

    def differing(self, other: FleetNode) -> set[SlotName]:
        """Return the slots in which a node of the same shape has other amounts."""
        pairs = [(offer, other.offers[agent]) for agent, offer in self.offers.items()]
        if self.whole is not None and other.whole is not None:
            pairs.append((self.whole, other.whole))
        return set().union(*(was.differing(now) for was, now in pairs if was is not now))

    @property
    def is_asked(self) -> bool:
        """Whether the node reports and can be called."""
        return self.status is NodeStatus.READY and bool(self.url) and not self.remark

    def has(self, labels: Mapping[str, str]) -> bool:
        """Return whether the node has all of these labels."""
        return all(self.labels.get(key) == value for key, value in labels.items())


@dataclass(frozen=True, slots=True)
class Use:
    """The usage of a slot over many nodes, in base units; the sums are exact.

    Amounts that are neither allocated nor free are unavailable, for example drained.
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
"""Tables are updated if at most one node in this many changed, and else rebuilt."""


class FleetTally:
    """The contribution of some nodes to the tables, restricted to `agents` or `names`.

    With `names`, rows take the other slots from `rows`.
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
        """Return the tables of exactly these nodes."""
        rankings = [ranked(self.rows, column) for column in range(len(self._nothing))]
        return Tables(self.columns, self.conflicts, self.uses(), rankings, Layered(self.rows))


@dataclass(frozen=True, eq=False)
class Tables:
    """Data derived from nodes: conflicts by node, sums by slot, and rankings by column.

    `rows` are those of agents that can get kernels. Columns are `AGENT` and then the slots by name.
    """

    columns: Mapping[SlotName, int]
    conflicts: Mapping[str, frozenset[SlotName]]
    uses: Mapping[SlotName, Use]
    rankings: Sequence[Ranking]
    rows: Layered[AgentKey, Row]

    def changed(self, before: FleetTally, after: FleetTally) -> Tables:
        """Return the tables after some nodes changed their contribution."""
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
    """All nodes and slot types at one revision; compared by identity."""

    revision: int = 0
    slot_types: Mapping[SlotName, SlotType] = field(default_factory=dict)
    nodes: Mapping[str, FleetNode] = field(default_factory=dict)

    def learned(self, node: FleetNode) -> list[SlotType]:
        """Return the slot types of a node that are new to the fleet."""
        return [slot for name, slot in node.slot_types.items() if name not in self.slot_types]

    def with_slot_type(self, slot: SlotType, revision: int) -> FleetView:
        """Return the view with a slot type; the first definition of a name stays."""
        if slot.name in self.slot_types:
            return self.changed((), revision=revision)
        return replace(self, slot_types={**self.slot_types, slot.name: slot}, revision=revision)

    def with_slot_types(self, slots: Mapping[SlotName, SlotType], revision: int) -> FleetView:
        """Return the view with exactly these slot types."""
        if dict(slots) == dict(self.slot_types):
            return self.changed((), revision=revision)
        return replace(self, slot_types=dict(slots), revision=revision)

    def without_slot_type(self, name: SlotName, revision: int) -> FleetView:
        """Return the view without a slot type.

        Raises:
            ValueError: a node offers it, offered it before it was lost, or may offer it in a newer
                schema; the message names some.
        """
        nodes = self.nodes.values()
        if newer := sorted(node.node_id for node in nodes if node.status is NodeStatus.NEWER):
            shown = ", ".join(newer[:5])
            raise ValueError(
                f"{len(newer)} nodes of a newer schema may offer {name} ({shown}); use a"
                " gateway of their version"
            )
        if offering := sorted(node.node_id for node in nodes if name in node.slot_types):
            shown = ", ".join(offering[:5])
            raise ValueError(f"{name} is offered by {len(offering)} nodes ({shown})")
        kept = {known: slot for known, slot in self.slot_types.items() if known != name}
        return replace(self, slot_types=kept, revision=revision)

    def with_node(self, node: FleetNode, revision: int) -> FleetView:
        """Return the view with a node's report."""
        return self.changed([node], revision=revision)

    def without_node(self, node_id: str, revision: int) -> FleetView:
        """Return the view without a node; its slot types stay."""
        return self.changed((), [node_id], revision)

    def changed(
        self, nodes: Iterable[FleetNode], gone: Iterable[str] = (), revision: int | None = None
    ) -> FleetView:
        """Return the view after a batch of changes: removals first, then reports.

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
        """Return the slots whose amounts some reports change, None if anything else changes."""
        names: set[SlotName] = set()
        for node_id, node in told.items():
            old = self.nodes.get(node_id)
            if old is None or not old.is_shaped_as(node):
                return None
            names |= old.differing(node)
        return names

    def debited(self, node_id: str, agent_id: str, slots: ResourceSlots) -> FleetView:
        """Return the view in which an agent holds more, with nothing free below zero.

        It represents a pending placement until the node's next report. The revision stays. An agent
        that is not in the view any more is ignored.
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
        """The derived data, built from scratch unless the previous view had most of it."""
        return FleetTally(self.slot_types, self.nodes.values()).tables()

    def rows(self, nodes: Iterable[str]) -> dict[AgentKey, Row]:
        """Return the free amounts of these nodes' agents that can get kernels."""
        rows = self.tables.rows
        keys = [(n.node_id, agent) for n in self._heard_of(nodes) for agent in n.offers]
        return {key: rows[key] for key in keys if key in rows}

    @property
    def conflicts(self) -> Mapping[str, frozenset[SlotName]]:
        """The slots that a node defines differently from the fleet, by node."""
        return self.tables.conflicts

    def state_of(self, node_id: str) -> str:
        """Return a node's state on the wire: its status, or `conflicting`."""
        status = self.nodes[node_id].status
        if status is NodeStatus.READY and node_id in self.conflicts:
            return "conflicting"
        return status.value

    def understood(self, node: FleetNode, slots: ResourceSlots) -> ResourceSlots:
        """Return the amounts of slots that node and fleet define equally; the others are zero."""
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
        types = self.slot_types.values()
        secondary = {slot.name: slot.primary for slot in types if slot.primary is not None}
        found: dict[SlotName, list[SlotName]] = {}
        for name in sorted(secondary, key=natural_key):
            found.setdefault(secondary[name], []).append(name)
        return found

    def statistics(
        self,
        nodes: Iterable[str] | None = None,
        *,
        agents: Iterable[str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> dict[SlotName, Use]:
        """Return the usage of every known slot over all or some reporting nodes.

        A slot that none of them has is zero. Lost nodes do not count.
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
    """Clamp an amount to the valid range, whatever a node reports."""
    return amount if 0 <= amount <= MAX_AMOUNT else min(max(amount, 0), MAX_AMOUNT)


def is_same(one: SlotType, other: SlotType) -> bool:
    """Return whether two definitions of a slot agree in kind, quantum and primary slot."""
    return (one.kind, one.quantum, one.primary) == (other.kind, other.quantum, other.primary)


def _strange(
    slot_types: Mapping[SlotName, SlotType], node: FleetNode, names: Iterable[SlotName]
) -> frozenset[SlotName]:
    """Return the slots that a node defines differently from the fleet."""
    found = ((name, node.slot_types[name]) for name in names)
    return frozenset(
        name
        for name, slot in found
        if (known := slot_types.get(name, slot)) is not slot and not is_same(slot, known)
    )
