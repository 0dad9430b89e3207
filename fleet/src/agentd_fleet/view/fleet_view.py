"""The fleet as one value: its nodes, and one set of slot types for all requests.

Slot types accumulate: a type that any node ever offered stays until an operator forgets it. The
first definition of a name stays; a node with a different definition is excluded for that slot only.
An amount that a node does not offer is zero. A view is immutable: a request keeps the one that it
began with.

Conflicts and sums are part of a view. A change of some nodes updates those of the previous view, a
change of the slot types counts all nodes again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import cached_property

import msgspec
from msgspec.structs import replace

from agentd.core.devices import natural_key
from agentd.core.slots import ResourceSlots, SlotName, SlotType, derived_amount


class NodeStatus(StrEnum):
    """The status of a node according to its reports."""

    READY = "ready"
    DAEMON_DOWN = "daemon-down"
    LOST = "lost"
    NEWER = "newer-schema"
    """This gateway cannot read the node's report, so no kernel is placed there."""


NO_SLOTS = ResourceSlots()
RUNTIME = "runtime"
"""The beginning of the reason of a node whose runtime is unavailable."""


class Offer(msgspec.Struct, frozen=True):
    """The amounts of an agent in base units: capacity, free and allocated.

    Agents that share devices each count all of them, and all of their free amounts.
    """

    capacity: ResourceSlots
    free: ResourceSlots
    allocated: ResourceSlots = NO_SLOTS


class Cordon(msgspec.Struct, frozen=True):
    """An operator keeps new kernels off a node; `since` is RFC 3339."""

    reason: str = ""
    by: str = ""
    since: str = ""


class NodeRuntime(msgspec.Struct, frozen=True):
    """The runtime of a node, and its state as the node reports it."""

    name: str = ""
    state: str = ""

    @property
    def reason(self) -> str:
        """Why the runtime runs no kernel now; empty if it does."""
        return f"{RUNTIME} {self.name} is unavailable" if self.state == "unavailable" else ""


class FleetNode(msgspec.Struct, frozen=True):
    """A node as last reported; `offers` and the `models` of devices by agent.

    `whole` is the total of all agents, each device counted once; None if no two agents share one. A
    `exclusion_reason` is the reason why no kernel is placed on the node, although it is listed. A
    `cordon` and `unreachable` (why calls of this gateway fail) are kept by `FleetState`.
    """

    node_id: str
    slot_types: Mapping[SlotName, SlotType]
    offers: Mapping[str, Offer]
    status: NodeStatus = NodeStatus.READY
    url: str = ""
    labels: Mapping[str, str] = {}
    generation: int = 0
    seen_at: float = 0.0
    exclusion_reason: str = ""
    models: Mapping[str, frozenset[str]] = {}
    whole: Offer | None = None
    runtime: NodeRuntime | None = None
    cordon: Cordon | None = None
    unreachable: str = ""

    @property
    def is_available(self) -> bool:
        """Whether the node reports and can be called."""
        return self.status is NodeStatus.READY and bool(self.url) and not self.exclusion_reason

    @property
    def is_answering(self) -> bool:
        """Whether the node is not known to leave calls unanswered."""
        return self.status is NodeStatus.READY and not self.unreachable

    @property
    def unusable_reason(self) -> str:
        """Why no kernel can be created on the node, although it reports; empty if one can."""
        unreachable = f"unreachable: {self.unreachable}" if self.unreachable else ""
        return self.reported_reason or unreachable

    @property
    def reported_reason(self) -> str:
        """Why no kernel is placed on the node according to its report; empty if one may be."""
        return self.exclusion_reason or (self.runtime.reason if self.runtime is not None else "")

    def has_labels(self, labels: Mapping[str, str]) -> bool:
        """Return whether the node has all of these labels."""
        return all(self.labels.get(key) == value for key, value in labels.items())


class SlotUsage(msgspec.Struct, frozen=True):
    """The usage of a slot over many nodes, in base units; the sums are exact.

    Amounts that are neither allocated nor free are unavailable, for example drained.
    """

    capacity: int = 0
    free: int = 0
    allocated: int = 0

    def __add__(self, other: SlotUsage) -> SlotUsage:
        return SlotUsage(
            self.capacity + other.capacity,
            self.free + other.free,
            self.allocated + other.allocated,
        )

    def __sub__(self, other: SlotUsage) -> SlotUsage:
        return SlotUsage(
            self.capacity - other.capacity,
            self.free - other.free,
            self.allocated - other.allocated,
        )


class FleetView(msgspec.Struct, frozen=True, eq=False, dict=True):
    """All nodes and slot types at one revision; compared by identity."""

    revision: int = 0
    slot_types: Mapping[SlotName, SlotType] = {}
    nodes: Mapping[str, FleetNode] = {}
    conflicts: Mapping[str, frozenset[SlotName]] = {}
    """The slots that a node defines differently from the fleet, by node."""
    usages: Mapping[SlotName, SlotUsage] = {}
    """The sums over all nodes; a slot without any amount may be missing."""

    def with_slot_types(self, slots: Mapping[SlotName, SlotType], revision: int) -> FleetView:
        """Return the view with exactly these slot types."""
        return FleetView(revision, slots).with_changes(self.nodes.values())

    def slot_in_use_reason(self, name: SlotName) -> str:
        """Return which nodes offer a slot, empty if none does.

        A lost node offers the slots that it last reported, a node of a newer schema may offer any.
        """
        nodes = self.nodes.values()
        if ids := sorted(node.node_id for node in nodes if node.status is NodeStatus.NEWER):
            return (
                f"{len(ids)} nodes of a newer schema may offer {name} ({', '.join(ids[:5])});"
                " use a gateway of their version"
            )
        if ids := sorted(node.node_id for node in nodes if name in node.slot_types):
            return f"{name} is offered by {len(ids)} nodes ({', '.join(ids[:5])})"
        return ""

    def with_changes(
        self,
        reports: Iterable[FleetNode],
        forgotten: Iterable[str] = (),
        revision: int | None = None,
    ) -> FleetView:
        """Return the view after a batch of changes: removals first, then reports.

        Of two reports of one node the later one counts. The revision stays if none is given.
        """
        forgotten, reported = set(forgotten), {node.node_id: node for node in reports}
        replaced = [
            self.nodes[node_id] for node_id in forgotten | reported.keys() if node_id in self.nodes
        ]
        nodes, conflicts, usages = dict(self.nodes), dict(self.conflicts), dict(self.usages)
        for node in replaced:
            conflicts.pop(node.node_id, None)
            for name, usage in self.node_usages(node).items():
                usages[name] -= usage
        for node_id in forgotten:
            nodes.pop(node_id, None)
        for node_id, node in reported.items():
            nodes[node_id] = node
            if conflicting := self._strange(node):
                conflicts[node_id] = conflicting
            for name, usage in self.node_usages(node).items():
                usages[name] = usages.get(name, SlotUsage()) + usage
        revision = self.revision if revision is None else revision
        return FleetView(revision, self.slot_types, nodes, conflicts, usages)

    def with_debit(self, node_id: str, agent_id: str, slots: ResourceSlots) -> FleetView:
        """Return the view in which an agent holds more, with nothing free below zero.

        It represents a pending placement until the node's next report. The revision stays. An agent
        that is not in the view any more is ignored.
        """
        node = self.nodes.get(node_id)
        if node is None or agent_id not in node.offers:
            return self
        offer = node.offers[agent_id]
        slots = self.with_derived_slots(node, agent_id, slots)
        offers = {**node.offers, agent_id: _with_less_free(offer, slots)}
        whole = None if node.whole is None else _with_less_free(node.whole, slots)
        return self.with_changes([replace(node, offers=offers, whole=whole)])

    def node_state(self, node_id: str) -> str:
        """Return a node's state on the wire: its status, or `conflicting`."""
        status = self.nodes[node_id].status
        if status is NodeStatus.READY and node_id in self.conflicts:
            return "conflicting"
        return status.value

    def common_slots(self, node: FleetNode, slots: ResourceSlots) -> ResourceSlots:
        """Return the amounts of slots that node and fleet define equally; the others are zero."""
        names = self._common_names(node)
        return ResourceSlots({name: slots[name] for name in names})

    def with_derived_slots(
        self, node: FleetNode, agent_id: str, requested: ResourceSlots
    ) -> ResourceSlots:
        """Return a request with the slots that it leaves out, in proportion to an agent's capacity.

        The node decides device by device; this is what it charges if its devices are alike.
        """
        families = [
            family for family in self._families if any(name in requested for name in family)
        ]
        if not families:
            return requested
        capacity = self.common_slots(node, node.offers[agent_id].capacity)
        amounts = dict(requested)
        for family in families:
            deciding = next(name for name in family if name in requested)
            for name in family:
                if name not in requested and (own_capacity := capacity[name]):
                    quantum, deciding_capacity = self.slot_types[name].quantum, capacity[deciding]
                    amounts[name] = derived_amount(
                        requested[deciding], deciding_capacity, own_capacity, quantum
                    )
        return ResourceSlots(amounts)

    @cached_property
    def _families(self) -> list[list[SlotName]]:
        """Each primary slot with its secondary ones, in natural order."""
        families: dict[SlotName, list[SlotName]] = {}
        for name in sorted(self.slot_types, key=natural_key):
            if (primary := self.slot_types[name].primary) is not None:
                families.setdefault(primary, [primary]).append(name)
        return list(families.values())

    def statistics(
        self,
        nodes: Iterable[str] | None = None,
        *,
        agents: Iterable[str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> dict[SlotName, SlotUsage]:
        """Return the usage of every known slot over all or some reporting nodes.

        A slot that none of them has is zero. Lost nodes do not count.
        """
        sums = dict.fromkeys(self.slot_types, SlotUsage())
        if nodes is None and agents is None and not labels:
            return {**sums, **self.usages}
        node_ids = self.nodes if nodes is None else set(nodes) & self.nodes.keys()
        for node in (self.nodes[node_id] for node_id in node_ids):
            if node.has_labels(labels or {}):
                for name, usage in self.node_usages(node, agents).items():
                    sums[name] += usage
        return sums

    def node_usages(
        self, node: FleetNode, agents: Iterable[str] | None = None
    ) -> dict[SlotName, SlotUsage]:
        """Return a node's usage of the fleet's slots, of all or some agents."""
        if node.status is NodeStatus.LOST:
            return {}
        agent_ids = node.offers if agents is None else node.offers.keys() & set(agents)
        sums = {name: [0, 0, 0] for name in self._common_names(node)}
        for offer in (node.offers[agent] for agent in agent_ids):
            # The amounts of an offer, not all slots: a node may have many of both.
            for index, amounts in enumerate((offer.capacity, offer.free, offer.allocated)):
                for name, amount in amounts.items():
                    if name in sums:
                        sums[name][index] += amount
        if node.whole is not None:
            for name, total in sums.items():
                total[0] = min(total[0], node.whole.capacity[name])
                total[1] = min(total[1], node.whole.free[name])
        return {name: SlotUsage(*total) for name, total in sums.items()}

    def _common_names(self, node: FleetNode) -> set[SlotName]:
        """Return the slots that node and fleet define equally."""
        return (node.slot_types.keys() & self.slot_types.keys()) - self._strange(node)

    def _strange(self, node: FleetNode) -> frozenset[SlotName]:
        """Return the slots that a node defines differently from the fleet."""
        return frozenset(
            name
            for name, slot in node.slot_types.items()
            if not is_same_slot_type(slot, self.slot_types.get(name, slot))
        )


def _with_less_free(offer: Offer, slots: ResourceSlots) -> Offer:
    free = {name: max(0, amount - slots[name]) for name, amount in offer.free.items()}
    allocated = offer.allocated + {name: n for name, n in slots.items() if name in offer.capacity}
    return replace(offer, free=ResourceSlots(free), allocated=allocated)


def is_same_slot_type(slot: SlotType, other: SlotType) -> bool:
    """Return whether two definitions of a slot agree in kind, quantum and primary slot."""
    return (slot.kind, slot.quantum, slot.primary) == (other.kind, other.quantum, other.primary)
