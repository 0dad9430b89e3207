"""Choosing devices for a kernel.

Arithmetic over values: no clock, no I/O, no logging. A decision is returned,
never applied; the owner of the ledger applies it.

A request is decided step by step: accelerators by device name, then cpu, then mem. A step is one
slot, or several slots of the same devices; the first one decides (`steps` beside this module).
Each step takes the index of devices of the agent's partition that offer the slot and
splits it into tiers: all of a tier is taken before the next is touched. Under
`prefer-single-node` the first step's tiers are the nodes, one that holds everything alone
before the others: with `fill` the one with least room, so that whole nodes stay whole, else
the one with most. Each later step's first tier is the nodes of the steps before. Inside a tier,
`distribute` (beside this module) says how much is taken from how many devices of each room;
equally free devices alternate between NUMA nodes, and of the threads of a core, or the parts of
a device, whole ones are taken first. Amounts of slots that the request does not name are derived
on each device (`derivation`).

Several slots of the same devices are given in equal parts, on the fewest devices that could hold
them so if all were empty. Considered are the devices with room for the larger part of each slot;
among those the tightest of the deciding slot are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import or_
from types import MappingProxyType
from typing import TypeAlias

from agentd.core.allocation import distribute
from agentd.core.allocation.explain import Question, refusal
from agentd.core.allocation.free_index import (
    Buckets,
    FreeIndex,
    Siblings,
    among,
    count_of,
    given,
    rooms,
    total,
)
from agentd.core.allocation.ledger import (
    Allocation,
    Holding,
    Ledger,
    Share,
    release,
    share_at,
    share_of,
)
from agentd.core.allocation.policy import Affinity, AllocationPolicy, Strategy
from agentd.core.allocation.steps import SlotStep, steps
from agentd.core.devices import DeviceId, Inventory
from agentd.core.partition.split import Partition
from agentd.core.slots import ResourceSlots, SlotType, device_name_of, is_divisible

Rule: TypeAlias = Callable[[distribute.Rooms, int], list[distribute.Portion]]
"""The division of an amount over rooms."""

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
    counted: dict[str, int] = {}
    near: frozenset[int] = frozenset()
    for step in steps(slots, inventory.slot_types):
        name = device_name_of(step.slot)
        named = only.get(name)
        earlier = counted.get(name, 0)
        left = ledger.within_limit(partition, name)
        chosen = _chosen(ledger, inventory, partition, step, near, policy, named)
        counts = 0
        if left is not None:
            counts = sum(share.counts for share in chosen or ())
        if chosen is None or (left is not None and earlier + counts > left):
            question = Question(
                ledger,
                inventory,
                partition,
                inventory.slot_types[step.slot],
                step.amounts,
                policy,
                named,
                earlier=earlier,
                counts=counts,
            )
            raise refusal(question)
        counted[name] = earlier + counts
        shares += chosen
        numa = (inventory.by_id[share.device_id].numa_node for share in chosen)
        near |= frozenset(node for node in numa if node is not None)
    return Allocation(tuple(shares))


def _chosen(
    ledger: Ledger,
    inventory: Inventory,
    partition: Partition,
    step: SlotStep,
    near: frozenset[int],
    policy: AllocationPolicy,
    named: frozenset[DeviceId] | None,
) -> list[Share] | None:
    """Return the shares of one step; None if it cannot be had."""
    indexes = [
        ledger.index(inventory, partition, inventory.slot_types[slot], beside)
        for slot, beside in step.indexes
    ]
    if named is not None:
        indexes = [index.only(named) for index in indexes]
    index = indexes[0]
    if len(indexes) > 1:
        return _together(inventory, indexes, step, near, policy)
    slot_type = inventory.slot_types[step.slot]
    parts = _parts(index, slot_type, step.amount, near, policy)
    if parts is None:
        return None
    return [share_at(index, at, part) for at, part in sorted(parts)]


def _parts(
    index: FreeIndex,
    slot_type: SlotType,
    amount: int,
    near: frozenset[int],
    policy: AllocationPolicy,
) -> list[tuple[int, int]] | None:
    """Return (position, quanta) of the devices that give one named slot."""
    wanted = amount // index.quantum
    is_whole = not is_divisible(slot_type)
    if total(index.buckets) < wanted:
        return None
    if len(index.devices) == 1:
        return [(0, wanted)] if wanted else []
    tiers = _tiers(index.buckets, wanted, near, policy)
    if is_whole or policy.allow_fragmentation:
        rule = _rule(policy.strategy, is_whole=is_whole)
        return _divide(tiers, wanted, rule, index.siblings)
    return _divide_equally(_groups(tiers, index.buckets, near), index.capacities, wanted)


def _groups(tiers: list[Buckets], buckets: Buckets, near: frozenset[int]) -> list[Buckets]:
    """Return the groups of devices among which equal parts are sought, in order."""
    anywhere: Buckets = {None: buckets[None]} if None in buckets else {}
    alone = tiers[:1] if near else [tier | anywhere for tier in tiers]
    return [*alone, *accumulate(tiers, or_)]


def _together(
    inventory: Inventory,
    indexes: Sequence[FreeIndex],
    step: SlotStep,
    near: frozenset[int],
    policy: AllocationPolicy,
) -> list[Share] | None:
    """Give several named slots of the same devices in equal parts."""
    wanted = [
        amount // index.quantum
        for amount, index in zip(step.amounts.values(), indexes, strict=True)
    ]
    count = distribute.fewest_together([index.sizes for index in indexes], wanted)
    if not count:
        return None
    larger = [-(-each // count) for each in wanted]
    fitting = indexes[0].with_room_for(larger[0])
    for index, least in zip(indexes[1:], larger[1:], strict=True):
        fitting &= index.with_room_for(least)
    if fitting.bit_count() < count:
        return None
    buckets = among(indexes[0].buckets, fitting)
    groups = _groups(_tiers(buckets, wanted[0], near, policy), buckets, near)
    group = next(group for group in groups if count_of(group) >= count)
    tightest = distribute.first_rooms(rooms(group), count)
    places = [distribute.Portion(room, larger[0], devices) for room, devices in tightest]
    chosen = sorted(at for at, _ in given(group, places))
    shares = []
    for number, at in enumerate(chosen):
        parts = {
            slot: (each // count + (number < each % count)) * index.quantum
            for slot, each, index in zip(step.amounts, wanted, indexes, strict=True)
        }
        shares.append(share_of(indexes[0].devices[at], inventory, parts))
    return shares


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
