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
from itertools import accumulate
from operator import add
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from agentd.core import distribute
from agentd.core.devices import Device, Inventory, natural_key
from agentd.core.explain import Question, refusal
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
    "release",
]


class _Offer(NamedTuple):
    """A usable device of a partition, and the most that its agent may hold of it."""

    device: Device
    limit: int


class _Candidate(NamedTuple):
    """A device with room, in quanta of its slot; `position` is its natural order."""

    room: int
    position: int
    numa_node: int | None
    device: Device


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
            question = Question(ledger, inventory, partition, slot_type, slots[slot], policy)
            raise refusal(question)
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
    quantum = slot_type.quantum
    offers = _offers(inventory, partition, slot_type.name)
    candidates = _candidates(ledger, partition, offers, quantum)
    wanted = amount // quantum
    is_whole = slot_type.kind is not SlotKind.COUNT or quantum == ONE
    if is_whole or policy.allow_fragmentation:
        parts = _divide(candidates, wanted, near, policy, is_whole=is_whole)
    else:
        capacities = [offer.limit // quantum for offer in offers]
        parts = _divide_equally(candidates, capacities, wanted, near, policy)
    if parts is None:
        return None
    return [
        Share(candidate.device.device_id, slot_type.name, slot_type.kind, part * quantum)
        for candidate, part in sorted(parts, key=lambda part: part[0].position)
    ]


_known_offers: WeakKeyDictionary[
    Inventory, dict[tuple[Partition, SlotName], tuple[_Offer, ...]]
] = WeakKeyDictionary()


def _offers(inventory: Inventory, partition: Partition, slot: SlotName) -> tuple[_Offer, ...]:
    """Return the devices that may give a slot to an agent, ledger apart, in natural order.

    Remembered for as long as the inventory lives: it changes with health and restarts, not
    with requests.
    """
    known = _known_offers.setdefault(inventory, {})
    offers = known.get((partition, slot))
    if offers is None:
        offers = known[partition, slot] = tuple(
            _Offer(device, limit)
            for device in inventory.by_slot.get(slot, ())
            if device.usable and (limit := partition.limit(device))
        )
    return offers


def _candidates(
    ledger: Ledger, partition: Partition, offers: Iterable[_Offer], quantum: int
) -> list[_Candidate]:
    held = ledger.held
    return [
        _Candidate(room, position, device.numa_node, device)
        for position, (device, limit) in enumerate(offers)
        if (
            room := (ledger.free(device, partition) if device.device_id in held else limit)
            // quantum
        )
    ]


_Parts: TypeAlias = list[tuple[_Candidate, int]]


def _divide(
    candidates: list[_Candidate],
    wanted: int,
    near: frozenset[int],
    policy: Policy,
    *,
    is_whole: bool,
) -> _Parts | None:
    if _room(candidates) < wanted:
        return None
    if policy.strategy is Strategy.FILL:
        rule = distribute.fill
    else:
        rule = distribute.evenly_whole if is_whole else distribute.evenly_shares
    result: _Parts = []
    for tier in _tiers(candidates, wanted, near, policy):
        take = min(wanted, _room(tier))
        if take:
            ordered = _alternating(tier)
            parts = rule([candidate.room for candidate in ordered], take)
            result += [pair for pair in zip(ordered, parts, strict=True) if pair[1]]
        wanted -= take
        if not wanted:
            break
    return result


def _divide_equally(
    candidates: list[_Candidate],
    capacities: Sequence[int],
    wanted: int,
    near: frozenset[int],
    policy: Policy,
) -> _Parts | None:
    """Give equal parts inside the first tier that can, else inside the first tiers together."""
    tiers = _tiers(candidates, wanted, near, policy)
    alone = tiers[:1] if near else tiers
    for group in (*alone, *accumulate(tiers, add)):
        ordered = _alternating(group)
        rooms = [candidate.room for candidate in ordered]
        if (parts := distribute.in_equal_parts(rooms, capacities, wanted)) is not None:
            return [pair for pair in zip(ordered, parts, strict=True) if pair[1]]
    return None


def _room(candidates: Iterable[_Candidate]) -> int:
    return sum([candidate.room for candidate in candidates])


def _alternating(candidates: list[_Candidate]) -> list[_Candidate]:
    """Order natural ids so that equally free devices alternate between NUMA nodes.

    Devices that are near everything come after those that have a node.
    """
    if len({candidate.numa_node for candidate in candidates}) == 1:
        return candidates
    turns: dict[tuple[int, int | None], int] = {}
    keyed = []
    for candidate in candidates:
        place = candidate.room, candidate.numa_node
        turn = turns[place] = turns.get(place, 0) + 1
        node = candidate.numa_node
        keyed.append((node is None, turn, node or 0, candidate.position, candidate))
    return [item[-1] for item in sorted(keyed)]


def _tiers(
    candidates: list[_Candidate], wanted: int, near: frozenset[int], policy: Policy
) -> list[list[_Candidate]]:
    """Split candidates into groups, each to be used up before the next is touched."""
    is_interleaved = policy.affinity is Affinity.INTERLEAVED
    if not near:
        return [candidates] if is_interleaved else _by_node(candidates)
    close = [c for c in candidates if c.numa_node is None or c.numa_node in near]
    if len(close) == len(candidates):
        return [close]
    far = [c for c in candidates if c.numa_node is not None and c.numa_node not in near]
    if is_interleaved or _room(close) >= wanted:
        return [close, far]
    return [close, *_by_node(far)]


def _by_node(candidates: Iterable[_Candidate]) -> list[list[_Candidate]]:
    """Group by NUMA node, the node with most room first; what is near everything joins it."""
    nodes: dict[int | None, list[_Candidate]] = {}
    for candidate in candidates:
        nodes.setdefault(candidate.numa_node, []).append(candidate)
    anywhere = nodes.pop(None, [])
    order = sorted(nodes, key=lambda node: (-_room(nodes[node]), node or 0))
    tiers = [nodes[node] for node in order]
    if not tiers:
        return [anywhere]
    if anywhere:
        tiers[0] = sorted(tiers[0] + anywhere, key=lambda candidate: candidate.position)
    return tiers
