"""The fleet as one value: its nodes, and the one set of slot types that all requests see.

Slot types accumulate: what any node ever offered is known, also while no node has it, until an
operator forgets it. The first definition of a name stays; a node that means something else by it
is left out for that slot, and for that slot alone. What a node does not offer is zero. A view
never changes: a request keeps the one that it began with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from agentd.core.slots import ResourceSlots, SlotName, SlotType


class NodeStatus(StrEnum):
    """How a node does, as far as it is heard of."""

    READY = "ready"
    DAEMON_DOWN = "daemon-down"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Offer:
    """What an agent of a node has, and what of it is free, in base units of the node's slots."""

    capacity: ResourceSlots
    free: ResourceSlots


@dataclass(frozen=True, slots=True)
class FleetNode:
    """A node as it told of itself last; `offers` by agent."""

    node_id: str
    slot_types: Mapping[SlotName, SlotType]
    offers: Mapping[str, Offer]
    status: NodeStatus = NodeStatus.READY
    url: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    generation: int = 0
    seen_at: float = 0.0

    def has(self, labels: Mapping[str, str]) -> bool:
        """Tell whether the node has all of these labels."""
        return all(self.labels.get(key) == value for key, value in labels.items())


@dataclass(frozen=True, slots=True)
class Use:
    """A slot over many nodes, in base units; the sums are exact."""

    capacity: int = 0
    free: int = 0

    @property
    def allocated(self) -> int:
        return self.capacity - self.free

    def __add__(self, other: Use) -> Use:
        return Use(self.capacity + other.capacity, self.free + other.free)


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
        known = {slot.name: slot, **self.slot_types}
        return replace(self, slot_types=known, revision=revision)

    def without_slot_type(self, name: SlotName, revision: int) -> FleetView:
        """Return the view in which a slot type is forgotten.

        Raises:
            ValueError: a node that is heard of offers it; the message names some.
        """
        if offering := sorted(n.node_id for n in self.nodes.values() if name in n.slot_types):
            shown = ", ".join(offering[:5])
            raise ValueError(f"{name} is offered by {len(offering)} nodes ({shown})")
        kept = {known: slot for known, slot in self.slot_types.items() if known != name}
        return replace(self, slot_types=kept, revision=revision)

    def with_node(self, node: FleetNode, revision: int) -> FleetView:
        """Return the view with a node as it is now."""
        return replace(self, nodes={**self.nodes, node.node_id: node}, revision=revision)

    def without_node(self, node_id: str, revision: int) -> FleetView:
        """Return the view without a node; what it taught of slots stays."""
        kept = {known: node for known, node in self.nodes.items() if known != node_id}
        return replace(self, nodes=kept, revision=revision)

    @cached_property
    def conflicts(self) -> Mapping[str, frozenset[SlotName]]:
        """The slots by which nodes mean something else than the fleet, by node."""
        found = {
            node.node_id: frozenset(
                name
                for name, slot in node.slot_types.items()
                if name in self.slot_types and not is_same(slot, self.slot_types[name])
            )
            for node in self.nodes.values()
        }
        return {node_id: names for node_id, names in found.items() if names}

    def state_of(self, node_id: str) -> str:
        """Return a node's state as it is shown: how it does, or that it is `conflicting`."""
        status = self.nodes[node_id].status
        if status is NodeStatus.READY and node_id in self.conflicts:
            return "conflicting"
        return status.value

    def understood(self, node: FleetNode, slots: ResourceSlots) -> ResourceSlots:
        """Return the amounts that mean the same to a node and to the fleet; the others are zero."""
        strange = self.conflicts.get(node.node_id, frozenset())
        return ResourceSlots(
            {
                name: amount
                for name, amount in slots.items()
                if name in self.slot_types and name not in strange
            }
        )

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
        chosen = None if nodes is None else set(nodes)
        whose = None if agents is None else set(agents)
        sums = dict.fromkeys(self.slot_types, Use())
        for node in self.nodes.values():
            is_chosen = chosen is None or node.node_id in chosen
            if node.status is NodeStatus.LOST or not (is_chosen and node.has(labels or {})):
                continue
            for agent, offer in node.offers.items():
                if whose is not None and agent not in whose:
                    continue
                free = self.understood(node, offer.free)
                for name, amount in self.understood(node, offer.capacity).items():
                    sums[name] += Use(amount, free[name])
        return sums


def is_same(one: SlotType, other: SlotType) -> bool:
    """Tell whether two nodes mean the same by a slot: its kind and its quantum."""
    return (one.kind, one.quantum) == (other.kind, other.quantum)
