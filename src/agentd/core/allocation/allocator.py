"""Choosing devices for a kernel.

Arithmetic over values: no clock, no I/O, no logging. A decision is returned,
never applied; whoever holds the ledger applies it.

A request is decided slot by slot: accelerators by device name, then cpu, then mem.
Each step takes the index of devices of the agent's partition that offer the slot and
splits it into tiers: all of a tier is taken before the next is touched. Under
`prefer-single-node` the first step's tiers are the nodes, one that holds everything alone
before the others: with `fill` the one with least room, so that whole nodes stay whole, else
the one with most. Each later step's first tier is the nodes of the steps before. Inside a tier,
`distribute` (beside this module) says how much is taken from how many devices of which room;
equally free devices alternate between NUMA nodes, and of the threads of a core, or the parts of
a device, whole ones are taken first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from operator import or_
from types import MappingProxyType
from typing import TypeAlias

from agentd.core.allocation import distribute
from agentd.core.allocation.explain import Question, refusal
from agentd.core.allocation.free_index import Buckets, FreeIndex, Siblings, given, rooms, total
from agentd.core.allocation.ledger import Allocation, Holding, Ledger, Share, release
from agentd.core.allocation.policy import Affinity, AllocationPolicy, Strategy
from agentd.core.devices import DeviceId, Inventory, natural_key
from agentd.core.partition.split import Partition
from agentd.core.slots import (
    CPU,
    MEM,
    ResourceSlots,
    SlotName,
    SlotType,
    device_name_of,
    is_divisible,
)

Rule: TypeAlias = Callable[[distribute.Rooms, int], list[distribute.Portion]]
"""How an amount is divided over rooms."""

__all__ = [
    "Affinity",
    "Allocation",
    "AllocationPolicy",
    "Holding",
    "Ledger",
    "Share",
    "Strategy",
    "allocate",
    "release",
]


def allocate(
    ledger: Ledger,
    inventory: Inventory,
    partition: Partition,
    slots: ResourceSlots,
    policy: AllocationPolicy,
    only: Mapping[str, frozenset[DeviceId]] = MappingProxyType({}),
) -> Allocation:
    """Choose devices for every slot of a request, or for none.

    `only` names, by device name, the devices that may be given; of other names all may.

    Raises:
        InsufficientResource: one of the slots cannot be had in full; nothing changed.
    """
    shares: list[Share] = []
    taken: Counter[str] = Counter()
    near: frozenset[int] = frozenset()
    for slot in sorted(slots, key=_step_order):
        slot_type = inventory.slot_types[slot]
        index = ledger.index(inventory, partition, slot_type)
        name = device_name_of(slot)
        named = only.get(name)
        if named is not None:
            index = index.only(named)
        left = ledger.within_limit(partition, name)
        chosen = None
        if left is None or taken[name] + slots[slot] <= left:
            chosen = _step(index, slot_type, slots[slot], near, policy)
        if chosen is None:
            asked, earlier = slots[slot], taken[name]
            question = Question(
                ledger, inventory, partition, slot_type, asked, policy, named, earlier=earlier
            )
            raise refusal(question)
        taken[name] += slots[slot]
        shares += chosen
        numa = (inventory.by_id[share.device_id].numa_node for share in chosen)
        near |= frozenset(node for node in numa if node is not None)
    return Allocation(tuple(shares))


def _step_order(slot: SlotName) -> tuple[int, object, object]:
    name = device_name_of(slot)
    return ((CPU, MEM).index(name) + 1 if name in (CPU, MEM) else 0, natural_key(name), slot)


def _step(
    index: FreeIndex,
    slot_type: SlotType,
    amount: int,
    near: frozenset[int],
    policy: AllocationPolicy,
) -> list[Share] | None:
    wanted = amount // index.quantum
    is_whole = not is_divisible(slot_type)
    if total(index.buckets) < wanted:
        return None
    tiers = _tiers(index.buckets, wanted, near, policy)
    parts: list[tuple[int, int]] | None
    if is_whole or policy.allow_fragmentation:
        rule = _rule(policy.strategy, is_whole=is_whole)
        parts = _divide(tiers, wanted, rule, index.siblings)
    else:
        anywhere: Buckets = {None: index.buckets[None]} if None in index.buckets else {}
        alone = tiers[:1] if near else [tier | anywhere for tier in tiers]
        parts = _divide_equally([*alone, *accumulate(tiers, or_)], index.capacities, wanted)
    if parts is None:
        return None
    return [
        Share(
            (device := index.devices[at]).device_id,
            device.stable_id,
            slot_type.name,
            slot_type.kind,
            part * index.quantum,
        )
        for at, part in sorted(parts)
    ]


def _rule(strategy: Strategy, *, is_whole: bool) -> Rule:
    if strategy is Strategy.FILL:
        return distribute.fill
    return distribute.evenly_whole if is_whole else distribute.evenly_shares


def _divide(
    tiers: Iterable[Buckets], wanted: int, rule: Rule, siblings: Siblings
) -> list[tuple[int, int]]:
    """Return (position, quanta) of the devices that give; the tiers hold what is wanted."""
    parts: list[tuple[int, int]] = []
    for tier in tiers:
        take = min(wanted, total(tier))
        if take:
            parts += given(tier, rule(rooms(tier), take), siblings)
        wanted -= take
        if not wanted:
            break
    return parts


def _divide_equally(
    groups: Iterable[Buckets], capacities: distribute.Rooms, wanted: int
) -> list[tuple[int, int]] | None:
    """Give equal parts inside the first group of devices that can."""
    for group in groups:
        parts = distribute.in_equal_parts(rooms(group), capacities, wanted)
        if parts is not None:
            return [*given(group, parts)]
    return None


def _tiers(
    buckets: Buckets, wanted: int, near: frozenset[int], policy: AllocationPolicy
) -> list[Buckets]:
    """Split an index into groups, each to be used up before the next is touched."""
    is_interleaved = policy.affinity is Affinity.INTERLEAVED
    if not near:
        return [buckets] if is_interleaved else _by_node(buckets, wanted, policy.strategy)
    close = {node: found for node, found in buckets.items() if node is None or node in near}
    far = {node: found for node, found in buckets.items() if node not in close}
    if is_interleaved or total(close) >= wanted:
        return [close, far]
    return [close, *_by_node(far, wanted - total(close), policy.strategy)]


def _by_node(buckets: Buckets, wanted: int, strategy: Strategy) -> list[Buckets]:
    """Group by NUMA node; what is near everything joins the first.

    With `fill`, nodes that hold all that is wanted come first, the one with least room before the
    others; else, and after those, the node with most room.
    """
    nodes = [node for node in buckets if node is not None]
    alone: dict[int, Buckets] = {node: {node: buckets[node]} for node in nodes}
    room = {node: total(alone[node]) for node in nodes}
    anywhere = total({None: buckets[None]}) if None in buckets else 0

    def order(node: int) -> tuple[bool, int, int]:
        is_snug = strategy is Strategy.FILL and room[node] + anywhere >= wanted
        return not is_snug, room[node] if is_snug else -room[node], node

    tiers = [alone[node] for node in sorted(nodes, key=order)]
    if None in buckets:
        tiers = tiers or [{}]
        tiers[0][None] = buckets[None]
    return tiers
