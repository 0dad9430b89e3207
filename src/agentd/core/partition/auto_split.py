"""Auto-split: dealing a node's devices to its agents, from the front.

What offers the same slot is dealt together, so that everybody gets of each; the parts of one
device stay side by side. Cores are dealt as physical cores, in the order NUMA node, core, thread,
as long as there are enough for everybody. With `auto-split-order = "numa"` devices are dealt
node by node, and each agent's cores come from the nodes of its devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from agentd.core.devices import Device, DeviceId, natural_key
from agentd.core.partition.rules import SplitOrder
from agentd.core.slots import CPU

Unit: TypeAlias = tuple[Device, ...]
"""What is not taken apart: a device, or the threads of a physical core."""


def split_units(total: int, parts: int) -> list[int]:
    """Return `parts` whole amounts that sum to `total`, the larger ones first.

    Amounts are in units of the caller's choosing and differ by one at most.

    Raises:
        ValueError: `parts` is not positive, or `total` is negative.
    """
    if parts < 1 or total < 0:
        raise ValueError(f"cannot split {total} into {parts}")
    share, rest = divmod(total, parts)
    return [share + 1] * rest + [share] * (parts - rest)


def deal(
    by_name: Mapping[str, Sequence[Device]], agents: Sequence[str], order: SplitOrder
) -> dict[str, list[DeviceId]]:
    """Return each agent's devices; `by_name` are in natural order, memory apart."""
    dealt: dict[str, list[Device]] = {agent: [] for agent in agents}
    for name, devices in by_name.items():
        for alike in _by_slot(devices) if name != CPU else ():
            units = [(device,) for device in _side_by_side(alike, order)]
            for agent, mine in _dealt(units, agents):
                dealt[agent] += mine
    cores = [*_core_units(by_name.get(CPU, ()), len(agents))]
    if order is SplitOrder.NUMA:
        near = {agent: {d.numa_node for d in devices} - {None} for agent, devices in dealt.items()}
        shares = _near(cores, near)
    else:
        shares = dict(_dealt(cores, agents))
    return {
        agent: [d.device_id for d in (*_natural(shares[agent]), *_natural(dealt[agent]))]
        for agent in agents
    }


def _natural(devices: Iterable[Device]) -> list[Device]:
    return sorted(devices, key=lambda device: natural_key(str(device.device_id)))


def _dealt(units: Sequence[Unit], agents: Sequence[str]) -> Iterator[tuple[str, list[Device]]]:
    rest = iter(units)
    for agent, count in zip(agents, split_units(len(units), len(agents)), strict=True):
        yield agent, [device for _ in range(count) for device in next(rest)]


def _by_slot(devices: Iterable[Device]) -> list[list[Device]]:
    groups: dict[str, list[Device]] = {}
    for device in devices:
        groups.setdefault(device.slot, []).append(device)
    return [groups[slot] for slot in sorted(groups, key=natural_key)]


def _side_by_side(devices: Sequence[Device], order: SplitOrder) -> list[Device]:
    """Order devices so that the parts of one are neighbours."""
    first: dict[str, int] = {}
    for position, device in enumerate(devices):
        first.setdefault(device.physical_id, position)

    def place(device: Device) -> tuple[bool, int, int]:
        node = _node_order(device) if order is SplitOrder.NUMA else (False, 0)
        return (*node, first[device.physical_id])

    return sorted(devices, key=place)


def _node_order(device: Device) -> tuple[bool, int]:
    return device.numa_node is None, device.numa_node or 0


def _core_units(cores: Sequence[Device], agents: int) -> Iterator[Unit]:
    """Yield physical cores, or threads where there are fewer cores than agents."""
    ordered = sorted(cores, key=lambda core: (_node_order(core), natural_key(core.physical_id)))
    physical: dict[str, list[Device]] = {}
    for core in ordered:
        physical.setdefault(core.physical_id, []).append(core)
    if len(physical) < agents:
        yield from ((core,) for core in ordered)
    else:
        yield from map(tuple, physical.values())


def _near(cores: Sequence[Unit], near: Mapping[str, set[int | None]]) -> dict[str, list[Device]]:
    """Give everybody as many cores as otherwise, from the nodes of its devices if they last.

    Who has the fewest nodes to choose from chooses first.
    """
    left = list(cores)
    wanted = dict(zip(near, split_units(len(left), len(near)), strict=True))
    shares: dict[str, list[Device]] = {agent: [] for agent in near}

    def take(agent: str, units: list[Unit]) -> None:
        for unit in units[: wanted[agent]]:
            left.remove(unit)
            shares[agent] += unit
            wanted[agent] -= 1

    for agent in sorted(near, key=lambda agent: len(near[agent]) or len(cores)):
        take(agent, [unit for unit in left if unit[0].numa_node in near[agent]])
    for agent in near:
        take(agent, list(left))
    return shares


def torn_cores(dealt: Mapping[str, Iterable[DeviceId]], cores: Iterable[Device]) -> Iterator[str]:
    """Yield the physical cores of which two agents have threads, and which agents."""
    owners = {device_id: agent for agent, ids in dealt.items() for device_id in ids}
    physical: dict[str, list[Device]] = {}
    for core in cores:
        if core.parent:
            physical.setdefault(core.parent, []).append(core)
    for threads in physical.values():
        agents = sorted({owners[c.device_id] for c in threads if c.device_id in owners})
        if len(agents) > 1:
            ids = ", ".join(core.device_id.id for core in threads)
            yield f"cpu {ids} are threads of one core and go to {' and '.join(agents)}"
