"""Choosing devices for a kernel.

Arithmetic over values: no clock, no I/O, no logging. A decision is returned,
never applied; the owner of the ledger applies it.

A request is decided step by step: accelerators by device name, then cpu, then mem. A step is one
slot, or several slots of the same devices; the first one decides (`steps` beside this module).

1.  The candidates are the devices of the agent's partition that offer the slot, with the room of
    each (`find_candidates`). Amounts of slots that the request does not name are derived on each
    device (`derivation`).
2.  NUMA nodes are put into tiers: all of a tier is taken before the next is touched. Under
    `prefer-single-node` the first step's tiers are the nodes, one that holds everything alone
    before the others: with `fill` the one with least room, so that whole nodes stay whole, else
    the one with most. Each later step's first tier is the nodes of the steps before.
3.  Inside a tier a rule divides the amount over the rooms (`distribute`).
4.  Devices with the same room alternate between NUMA nodes; of the threads of a core, or the parts
    of a device, whole ones are taken first (`choose_alike`).

Several slots of the same devices are given in equal parts, on the fewest devices that could hold
them so if all were empty. Considered are the devices with room for the larger part of each slot;
among those the tightest of the deciding slot are taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import attrgetter, or_
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from agentd.core.allocation import distribute
from agentd.core.allocation.candidates import (
    DeviceCandidate,
    choose_alike,
    devices_with_room,
    find_candidates,
)
from agentd.core.allocation.explain import ExplainContext, build_refusal
from agentd.core.allocation.ledger import Allocation, Ledger, Share, build_share
from agentd.core.allocation.policy import Affinity, AllocationPolicy, Strategy
from agentd.core.allocation.steps import SlotStep, order_steps
from agentd.core.devices import DeviceId, Inventory
from agentd.core.groups import group
from agentd.core.partition.split import Partition
from agentd.core.slots import ResourceSlots, SlotName, device_name_of, is_divisible

NumaNodes: TypeAlias = set[int | None]
"""NUMA nodes; None is the place of devices that are near everything."""


class _Placement(msgspec.Struct):
    """The preferences of a request among its candidates; `near` are nodes of earlier steps."""

    inventory: Inventory
    policy: AllocationPolicy
    near: set[int]


def allocate(
    ledger: Ledger,
    inventory: Inventory,
    partition: Partition,
    slots: ResourceSlots,
    policy: AllocationPolicy,
    named_devices: Mapping[str, frozenset[DeviceId]] = MappingProxyType({}),
) -> Allocation:
    """Choose devices for every slot of a request, or for none.

    `named_devices` names, by device name, the devices that may be given; of other names all may.

    Raises:
        InsufficientResource: one of the slots cannot be had in full; nothing changed.
    """
    shares: list[Share] = []
    usage_by_name: Counter[str] = Counter()
    placement = _Placement(inventory, policy, near=set())
    for step in order_steps(slots, inventory.slot_types):
        name = device_name_of(step.slot)
        candidates_by_slot = {
            slot: find_candidates(
                ledger, inventory, partition, slot, [*step.amounts], named_devices.get(name)
            )
            for slot in step.amounts
        }
        step_shares = _choose_shares(candidates_by_slot, step, placement)
        step_usage = sum(share.limit_usage for share in step_shares)
        headroom = ledger.limit_headroom(partition, name)
        if not step_shares or (
            headroom is not None and usage_by_name[name] + step_usage > headroom
        ):
            context = ExplainContext(
                ledger=ledger,
                inventory=inventory,
                partition=partition,
                slot_type=inventory.slot_types[step.slot],
                requested=step.amounts,
                policy=policy,
                named_devices=named_devices.get(name),
                earlier_usage=usage_by_name[name],
                step_usage=step_usage,
            )
            raise build_refusal(context)
        usage_by_name[name] += step_usage
        shares += step_shares
        nodes = {inventory.by_id[share.device_id].numa_node for share in step_shares}
        placement.near |= {node for node in nodes if node is not None}
    return Allocation(tuple(shares))


def _choose_shares(
    candidates_by_slot: Mapping[SlotName, Sequence[DeviceCandidate]],
    step: SlotStep,
    placement: _Placement,
) -> list[Share]:
    """Return the shares of one step, in natural order; none if it cannot be had."""
    slot, candidates, inventory = step.slot, candidates_by_slot[step.slot], placement.inventory
    quanta = {slot: inventory.quantum(slot) for slot in step.amounts}
    wanted = {slot: amount // quanta[slot] for slot, amount in step.amounts.items()}
    if len(wanted) > 1:
        parts = _divide_slots(candidates_by_slot, wanted, placement)
    else:
        quanta_by_device = _divide_slot(candidates, slot, wanted[slot], placement)
        parts = {device_id: {slot: part} for device_id, part in quanta_by_device.items()}
    return [
        build_share(
            candidate.device,
            inventory,
            {slot: part * quanta[slot] for slot, part in parts[candidate.device_id].items()},
        )
        for candidate in candidates
        if candidate.device_id in parts
    ]


def _divide_slot(
    candidates: Sequence[DeviceCandidate],
    slot: SlotName,
    wanted: int,
    placement: _Placement,
) -> dict[DeviceId, int]:
    """Return the quanta that each device gives of one slot; empty if they have too few."""
    if sum(candidate.room for candidate in candidates) < wanted:
        return {}
    inventory, policy = placement.inventory, placement.policy
    tiers = _numa_tiers(candidates, wanted, placement)
    are_shares = is_divisible(inventory.slot_types[slot])
    if are_shares and not policy.allow_fragmentation:
        count = distribute.fewest_devices(sorted(c.capacity for c in candidates), wanted)
        for nodes in _equal_part_groups(tiers, placement) if count else ():
            tier = _sort_by_room(candidates, nodes)
            if parts := distribute.equal_parts([c.room for c in tier], wanted, count):
                return _assign(tier, parts, inventory)
        return {}
    rule = distribute.evenly_in_shares if are_shares else distribute.evenly
    if policy.strategy is Strategy.FILL:
        rule = distribute.fill
    quanta_by_device: dict[DeviceId, int] = {}
    for nodes in tiers:
        tier = _sort_by_room(candidates, nodes)
        rooms = [candidate.room for candidate in tier]
        amount = min(wanted, sum(rooms))
        quanta_by_device |= _assign(tier, rule(rooms, amount), inventory)
        wanted -= amount
    return quanta_by_device


def _divide_slots(
    candidates_by_slot: Mapping[SlotName, Sequence[DeviceCandidate]],
    wanted: Mapping[SlotName, int],
    placement: _Placement,
) -> dict[DeviceId, dict[SlotName, int]]:
    """Return the quanta that each device gives of several slots, in equal parts."""
    capacities = {
        slot: {c.device_id: c.capacity for c in candidates_by_slot[slot]} for slot in wanted
    }
    count = distribute.fewest_devices_together(capacities, wanted)
    if not count:
        return {}
    deciding = next(iter(wanted))
    device_ids = devices_with_room(candidates_by_slot, wanted, count)
    fitting = [c for c in candidates_by_slot[deciding] if c.device_id in device_ids]
    tiers = _numa_tiers(fitting, wanted[deciding], placement)
    for nodes in _equal_part_groups(tiers, placement):
        tier = _sort_by_room(fitting, nodes)
        if len(tier) >= count:
            tightest = _assign(tier, [1] * count + [0] * (len(tier) - count), placement.inventory)
            chosen_ids = [c.device_id for c in fitting if c.device_id in tightest]
            return {
                device_id: {
                    slot: amount // count + (number < amount % count)
                    for slot, amount in wanted.items()
                }
                for number, device_id in enumerate(chosen_ids)
            }
    return {}


def _sort_by_room(candidates: Sequence[DeviceCandidate], nodes: NumaNodes) -> list[DeviceCandidate]:
    """Return the candidates on these NUMA nodes, those with least room first."""
    on_nodes = [candidate for candidate in candidates if candidate.device.numa_node in nodes]
    return sorted(on_nodes, key=attrgetter("room"))


def _assign(
    candidates: Sequence[DeviceCandidate], parts: Sequence[int], inventory: Inventory
) -> dict[DeviceId, int]:
    """Return the part of each device that gives one, given a part for each candidate.

    Which of several candidates with the same room give is decided here, larger parts first.
    """
    alike = group((candidate.room, candidate) for candidate in candidates)
    parts_by_room = group(
        (candidate.room, part) for candidate, part in zip(candidates, parts, strict=True) if part
    )
    part_by_device: dict[DeviceId, int] = {}
    for room, parts_of_room in parts_by_room.items():
        chosen = choose_alike(alike[room], len(parts_of_room), inventory)
        largest_first = sorted(parts_of_room, reverse=True)
        part_by_device |= zip([c.device_id for c in chosen], largest_first, strict=True)
    return part_by_device


def _equal_part_groups(tiers: Sequence[NumaNodes], placement: _Placement) -> list[NumaNodes]:
    """Return the groups of NUMA nodes among which equal parts are sought, in order."""
    alone = tiers[:1] if placement.near else [tier | {None} for tier in tiers]
    return [*alone, *accumulate(tiers, or_)]


def _numa_tiers(
    candidates: Sequence[DeviceCandidate], wanted: int, placement: _Placement
) -> list[NumaNodes]:
    """Return groups of NUMA nodes, each to be used up before the next is touched."""
    rooms: Counter[int | None] = Counter()
    for candidate in candidates:
        if candidate.room:
            rooms[candidate.device.numa_node] += candidate.room
    near, policy = placement.near, placement.policy
    is_interleaved = policy.affinity is Affinity.INTERLEAVED
    if not near:
        return [{*rooms}] if is_interleaved else _rank_nodes(rooms, wanted, policy.strategy)
    close = {node for node in rooms if node is None or node in near}
    remaining = wanted - sum(rooms[node] for node in close)
    far = {node: rooms[node] for node in rooms if node not in close}
    if is_interleaved or remaining <= 0:
        return [close, {*far}]
    return [close, *_rank_nodes(far, remaining, policy.strategy)]


def _rank_nodes(
    rooms: Mapping[int | None, int], wanted: int, strategy: Strategy
) -> list[NumaNodes]:
    """Order NUMA nodes; what is near everything joins the first.

    With `fill`, nodes that hold all that is wanted come first, the one with least room before the
    others; else, and after those, the node with most room.
    """
    anywhere = rooms.get(None, 0)

    def order(node: int) -> tuple[bool, int, int]:
        is_snug = strategy is Strategy.FILL and rooms[node] + anywhere >= wanted
        return not is_snug, rooms[node] if is_snug else -rooms[node], node

    nodes = sorted((node for node in rooms if node is not None), key=order)
    tiers: list[NumaNodes] = [{node} for node in nodes] or [set()]
    if None in rooms:
        tiers[0].add(None)
    return tiers
