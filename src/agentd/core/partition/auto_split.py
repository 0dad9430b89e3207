"""Auto-split: dealing a node's devices to its agents, from the front.

Devices that offer the same slots are dealt together, so that each agent gets some of them. The
parts of one device stay side by side. Cores are dealt as physical cores, in the order NUMA node,
core, thread, as long as there is one for each agent. With `auto-split-order = "numa"` devices are
dealt node by node, and each agent's cores come from the nodes of its devices. With `"plugin"` cores
are dealt in the same way, and devices as their plugin deals them, else in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from agentd.core.conditions import Condition
from agentd.core.devices import Device, DeviceId, natural_key
from agentd.core.groups import group
from agentd.core.partition.plugin_assignment import PluginAssignment
from agentd.core.partition.rules import SplitOrder
from agentd.core.slots import CPU

Unit: TypeAlias = tuple[Device, ...]
"""Devices that stay together: a single one, or the threads of a physical core."""


def split_units(total: int, parts: int) -> list[int]:
    """Return `parts` whole amounts that sum to `total`, the larger ones first.

    Amounts are in units of the caller's choosing and differ by one at most.

    Raises:
        ValueError: `parts` is not positive, or `total` is negative.
    """
    if parts < 1 or total < 0:
        raise ValueError(f"cannot split {total} into {parts}")
    share, remainder = divmod(total, parts)
    return [share + 1] * remainder + [share] * (parts - remainder)


def deal_devices(
    by_name: Mapping[str, Sequence[Device]],
    agents: Sequence[str],
    order: SplitOrder,
    dealings: Mapping[str, PluginAssignment | None] = MappingProxyType({}),
) -> dict[str, list[DeviceId]]:
    """Return each agent's devices; `by_name` are in natural order, memory apart.

    `dealings` are those of plugins, by device name. Devices whose dealing is None go to no agent.
    """
    dealt: dict[str, list[Device]] = {agent: [] for agent in agents}
    for name, devices in by_name.items():
        if name == CPU:
            continue
        shares = shares_in_order(devices, agents, order)
        if name in dealings:
            dealing = dealings[name]
            shares = dealing.shares(devices) if dealing else {}
        for agent, share in shares.items():
            dealt[agent] += share
    cores = [*_core_units(by_name.get(CPU, ()), len(agents))]
    if order is not SplitOrder.ID:
        nodes = {agent: {d.numa_node for d in devices} - {None} for agent, devices in dealt.items()}
        shares = _deal_near_devices(cores, nodes)
    else:
        shares = dict(_deal_out(cores, agents))
    return {
        agent: [d.device_id for d in (*_sort_by_id(shares[agent]), *_sort_by_id(dealt[agent]))]
        for agent in agents
    }


def shares_in_order(
    devices: Iterable[Device], agents: Sequence[str], order: SplitOrder = SplitOrder.ID
) -> dict[str, list[Device]]:
    """Return each agent's share of devices in natural order, dealt from the front."""
    shares: dict[str, list[Device]] = {agent: [] for agent in agents}
    for alike in _group_by_slots(devices):
        units = [(device,) for device in _group_parts(alike, order)]
        for agent, share in _deal_out(units, agents):
            shares[agent] += share
    return shares


def _sort_by_id(devices: Iterable[Device]) -> list[Device]:
    return sorted(devices, key=lambda device: natural_key(str(device.device_id)))


def _deal_out(units: Sequence[Unit], agents: Sequence[str]) -> Iterator[tuple[str, list[Device]]]:
    remaining = iter(units)
    for agent, count in zip(agents, split_units(len(units), len(agents)), strict=True):
        yield agent, [device for _ in range(count) for device in next(remaining)]


def _group_by_slots(devices: Iterable[Device]) -> list[list[Device]]:
    groups = group((device.slot_names, device) for device in devices)
    return [groups[slots] for slots in sorted(groups, key=lambda slots: [*map(natural_key, slots)])]


def _group_parts(devices: Sequence[Device], order: SplitOrder) -> list[Device]:
    """Order devices so that the parts of one are adjacent."""
    first: dict[str, int] = {}
    for position, device in enumerate(devices):
        first.setdefault(device.physical_id, position)

    def sort_key(device: Device) -> tuple[bool, int, int]:
        node = _node_order(device) if order is SplitOrder.NUMA else (False, 0)
        return (*node, first[device.physical_id])

    return sorted(devices, key=sort_key)


def _node_order(device: Device) -> tuple[bool, int]:
    return device.numa_node is None, device.numa_node or 0


def _core_units(cores: Sequence[Device], agents: int) -> Iterator[Unit]:
    """Yield physical cores, or threads where there are fewer cores than agents."""
    ordered = sorted(cores, key=lambda core: (_node_order(core), natural_key(core.physical_id)))
    physical = group((core.physical_id, core) for core in ordered)
    if len(physical) < agents:
        yield from ((core,) for core in ordered)
    else:
        yield from map(tuple, physical.values())


def _deal_near_devices(
    cores: Sequence[Unit], nodes: Mapping[str, set[int | None]]
) -> dict[str, list[Device]]:
    """Deal each agent as many cores as otherwise, from the nodes of its devices if possible.

    The agent with the fewest nodes to choose from chooses first.
    """
    remaining = list(cores)
    counts = dict(zip(nodes, split_units(len(remaining), len(nodes)), strict=True))
    shares: dict[str, list[Device]] = {agent: [] for agent in nodes}

    def take(agent: str, units: list[Unit]) -> None:
        for unit in units[: counts[agent]]:
            remaining.remove(unit)
            shares[agent] += unit
            counts[agent] -= 1

    for agent in sorted(nodes, key=lambda agent: len(nodes[agent]) or len(cores)):
        take(agent, [unit for unit in remaining if unit[0].numa_node in nodes[agent]])
    for agent in nodes:
        take(agent, list(remaining))
    return shares


def split_core_conditions(
    dealt: Mapping[str, Iterable[DeviceId]], cores: Iterable[Device]
) -> Iterator[Condition]:
    """Yield the physical cores whose threads two agents have, with these agents."""
    owners = {device_id: agent for agent, ids in dealt.items() for device_id in ids}
    physical = group((core.parent, core) for core in cores if core.parent)
    for threads in physical.values():
        agents = sorted({owners[c.device_id] for c in threads if c.device_id in owners})
        if len(agents) > 1:
            ids = ", ".join(core.device_id.id for core in threads)
            reason = f"cpu {ids} are threads of one core and go to {' and '.join(agents)}"
            yield Condition("host", reason, agents=tuple(agents))
