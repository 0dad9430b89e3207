"""Choosing devices for a kernel.

Arithmetic over values: no clock, no I/O, no logging. A decision is returned,
never applied; whoever holds the ledger applies it.

A request is decided slot by slot: accelerators by device name, then cpu, then mem.
Each step looks at the devices of the agent's partition that offer the slot, in an
order under which equally free devices alternate between NUMA nodes, and splits them
into tiers: all of a tier is taken before the next is touched. Under
`prefer-single-node` the first step's tiers are the nodes (the one with most room that
holds everything alone, if there is one); each later step's first tier is the nodes
of the steps before. Inside a tier, `agentd.core.distribute` divides the amount.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from agentd.core import distribute
from agentd.core.devices import Device, Inventory, natural_key
from agentd.core.explain import explain, refusal
from agentd.core.ledger import Allocation, Holding, Ledger, Share, release
from agentd.core.partition import Partition
from agentd.core.policy import Affinity, Policy, Strategy
from agentd.core.slots import (
    CPU,
    MEM,
    ONE,
    ResourceSlots,
    SlotKind,
    SlotName,
    SlotType,
    device_name_of,
)

__all__ = [
    "Affinity",
    "Allocation",
    "Holding",
    "Ledger",
    "Policy",
    "Share",
    "Strategy",
    "allocate",
    "explain",
    "release",
]


class _Candidate(NamedTuple):
    device: Device
    room: int
    """What it can still give, in quanta of its slot."""


def allocate(
    ledger: Ledger,
    inventory: Inventory,
    partition: Partition,
    slots: ResourceSlots,
    policy: Policy,
) -> Allocation:
    """Choose devices for every slot of a request, or for none.

    Raises:
        InsufficientResource: one of the slots cannot be had in full; nothing changed.
    """
    shares: list[Share] = []
    near: frozenset[int] = frozenset()
    for slot in sorted(slots, key=_step_order):
        slot_type = inventory.slot_types[slot]
        chosen = _step(ledger, inventory, partition, slot_type, slots[slot], near, policy)
        if chosen is None:
            raise refusal(ledger, inventory, partition, slot_type, slots[slot], policy)
        shares += chosen
        numa = (inventory.by_id[share.device_id].numa_node for share in chosen)
        near |= frozenset(node for node in numa if node is not None)
    return Allocation(tuple(shares))


def _step_order(slot: SlotName) -> tuple[int, object, object]:
    name = device_name_of(slot)
    return ((CPU, MEM).index(name) + 1 if name in (CPU, MEM) else 0, natural_key(name), slot)


def _step(
    ledger: Ledger,
    inventory: Inventory,
    partition: Partition,
    slot_type: SlotType,
    amount: int,
    near: frozenset[int],
    policy: Policy,
) -> list[Share] | None:
    wanted = amount // slot_type.quantum
    offering = inventory.by_slot.get(slot_type.name, ())
    candidates = [
        _Candidate(device, ledger.free(device, partition) // slot_type.quantum)
        for device in offering
        if device.device_id in partition.members
    ]
    parts = _divide(candidates, wanted, slot_type, near, policy)
    if parts is None:
        return None
    return [
        Share(candidate.device.device_id, slot_type.name, slot_type.kind, part * slot_type.quantum)
        for candidate, part in parts
        if part
    ]


def _divide(
    candidates: Sequence[_Candidate],
    wanted: int,
    slot_type: SlotType,
    near: frozenset[int],
    policy: Policy,
) -> list[tuple[_Candidate, int]] | None:
    ordered = _alternating(candidates)
    is_whole = slot_type.kind is not SlotKind.COUNT or slot_type.quantum == ONE
    if not is_whole and not policy.allow_fragmentation:
        capacities = [c.device.offered // slot_type.quantum for c in ordered]
        return _unfragmented(ordered, capacities, wanted, near, policy)
    if _room(ordered) < wanted:
        return None
    if policy.strategy is Strategy.FILL:
        rule = distribute.fill
    else:
        rule = distribute.evenly_whole if is_whole else distribute.evenly_shares
    result: list[tuple[_Candidate, int]] = []
    for tier in _tiers(ordered, wanted, near, policy):
        take = min(wanted, _room(tier))
        result += zip(tier, rule([c.room for c in tier], take) if take else (), strict=False)
        wanted -= take
    return _in_order(candidates, result)


def _unfragmented(
    ordered: Sequence[_Candidate],
    capacities: Sequence[int],
    wanted: int,
    near: frozenset[int],
    policy: Policy,
) -> list[tuple[_Candidate, int]] | None:
    def parts_in(group: Sequence[_Candidate]) -> list[tuple[_Candidate, int]] | None:
        parts = distribute.in_equal_parts([c.room for c in group], capacities, wanted)
        return None if parts is None else list(zip(group, parts, strict=True))

    reach: list[_Candidate] = []
    for tier in _tiers(ordered, wanted, near, policy):
        reach += tier
        if (parts := parts_in(reach)) is not None:
            return parts
    return None


def _in_order(
    candidates: Sequence[_Candidate], parts: Iterable[tuple[_Candidate, int]]
) -> list[tuple[_Candidate, int]]:
    rank = {candidate.device.device_id: n for n, candidate in enumerate(candidates)}
    return sorted(parts, key=lambda part: rank[part[0].device.device_id])


def _room(candidates: Iterable[_Candidate]) -> int:
    return sum(candidate.room for candidate in candidates)


def _alternating(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Order natural ids so that equally free devices alternate between NUMA nodes.

    Devices that are near everything come after those that have a node.
    """
    seen: dict[tuple[int, int | None], int] = {}
    keyed = []
    for position, candidate in enumerate(candidates):
        node = candidate.device.numa_node
        turn = seen.get((candidate.room, node), 0)
        seen[candidate.room, node] = turn + 1
        keyed.append(((node is None, turn, node or 0, position), candidate))
    return [candidate for _, candidate in sorted(keyed, key=lambda item: item[0])]


def _tiers(
    ordered: Sequence[_Candidate], wanted: int, near: frozenset[int], policy: Policy
) -> list[list[_Candidate]]:
    """Split candidates into groups, each to be used up before the next is touched."""
    if near:
        close = [c for c in ordered if c.device.numa_node is None or c.device.numa_node in near]
        far = [c for c in ordered if c.device.numa_node not in {*near, None}]
        if _room(close) >= wanted or policy.affinity is Affinity.INTERLEAVED:
            return [close, far]
        return [close, *_by_node(far)]
    if policy.affinity is Affinity.INTERLEAVED:
        return [list(ordered)]
    return _by_node(ordered)


def _by_node(ordered: Sequence[_Candidate]) -> list[list[_Candidate]]:
    """Group by NUMA node, the node with most room first; what is near everything joins it."""
    rooms: dict[int, int] = {}
    for candidate in ordered:
        if (node := candidate.device.numa_node) is not None:
            rooms[node] = rooms.get(node, 0) + candidate.room
    order = sorted(rooms, key=lambda node: (-rooms[node], node))
    if not order:
        return [list(ordered)]
    tiers = [[c for c in ordered if c.device.numa_node == node] for node in order]
    tiers[0] = [c for c in ordered if c.device.numa_node in {None, order[0]}]
    return tiers
