"""What this node serves, beside other daemons of the machine: no accelerator twice.

Only what can be given to an agent, or is held, is claimed. What another daemon serves is
withheld here for as long as it does, with its seat kept; cores and memory that others serve
too are a warning alone, as an operator may well want that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import structlog

from agentd.core.devices import Device, DeviceId
from agentd.core.kernel import Kernel
from agentd.core.rules import AllocationMode
from agentd.core.slots import CPU, MEM
from agentd.services.devices import NodeDevices
from agentd.services.interfaces import Neighbour, Neighbours, Served, ServedDevice
from agentd.services.state import NodeState

log = structlog.get_logger()
_UNDECIDED = "another agentd of this machine has been deciding what it serves for too long"


class Serving:
    """Keeps the devices of a node apart from those that others serve.

    `real_cores` and `real_memory` are what the machine has of what is not declared: nobody
    knows whether declared cores are the same as another daemon's.
    """

    def __init__(
        self,
        devices: NodeDevices,
        state: NodeState,
        neighbours: Neighbours,
        real_cores: Iterable[str],
        real_memory: int | None,
    ) -> None:
        self._devices = devices
        self._state = state
        self._neighbours = neighbours
        self._real_cores = frozenset(real_cores)
        self._real_memory = real_memory
        before = neighbours.own()
        self._held_before = (
            {key for device in before.devices if device.held for key in device.keys}
            if before
            else set()
        )
        self._served: tuple[ServedDevice, ...] = ()
        self._is_over = False
        state.listen(self._changed)

    def update(self) -> None:
        """Decide anew what this node serves; to be called after every change of its devices."""
        if self._is_over:
            return
        with self._neighbours.deciding() as may_decide:
            others = self._neighbours.others()
            wanted = {device.device_id: self._as_served(device) for device in self._wanted()}
            taken = _taken(others)
            withheld = {
                device_id: taken[key]
                for device_id, device in wanted.items()
                if (key := next((key for key in device.keys if key in taken), None))
            }
            if not may_decide:
                mine = {device.name for device in self._served}
                new = [i for i in wanted if str(i) not in mine and i not in withheld]
                withheld |= dict.fromkeys(new, _UNDECIDED)
            self._publish(device for i, device in wanted.items() if i not in withheld)
        remarks = (*self._warnings(others), *self._neighbours.warnings())
        self._devices.withhold(withheld, remarks)

    def close(self) -> None:
        """Serve nothing any more but what kernels hold."""
        self._is_over = True
        self._neighbours.publish(Served(tuple(d for d in self._as_of_now() if d.held)))

    def _changed(self, before: Kernel | None, now: Kernel | None) -> None:
        """Say which devices are held, before anything is started on them."""
        if self._served and _holds_any(before) != _holds_any(now) and not self._is_over:
            self._publish(self._as_of_now())

    def _as_of_now(self) -> Iterator[ServedDevice]:
        served = {device.name for device in self._served}
        for device in self._wanted():
            if str(device.device_id) in served:
                yield self._as_served(device)

    def _publish(self, devices: Iterable[ServedDevice]) -> None:
        self._served = tuple(devices)
        cores, memory = self._cores(), self._memory_bytes()
        self._neighbours.publish(Served(self._served, cores, memory))

    def _wanted(self) -> Iterator[Device]:
        """Yield the accelerators that this node can give to somebody, or has given."""
        split, held = self._devices.split, self._state.ledger.held
        given = {i for partition in split.partitions.values() for i in partition.members}
        for device in split.inventory.devices:
            if device.device_id.name in (CPU, MEM) or device.is_simulated:
                continue
            if device.device_id in held or (device.device_id in given and not device.gone):
                yield device

    def _as_served(self, device: Device) -> ServedDevice:
        keys = device.physical_keys()
        if self._held_before and self._state.is_listed:
            self._held_before = set()
        held = device.device_id in self._state.ledger.held
        held = held or not keys.isdisjoint(self._held_before)
        return ServedDevice(str(device.device_id), tuple(sorted(keys)), held)

    def _cores(self) -> tuple[str, ...]:
        split = self._devices.split
        given = {i.id for p in split.partitions.values() for i in p.members if i.name == CPU}
        return tuple(sorted(given & self._real_cores, key=int))

    def _memory_bytes(self) -> int:
        if self._real_memory is None:
            return 0
        partitions = self._devices.split.partitions.values()
        sizes = [partition.memory_bytes for partition in partitions]
        is_shared = self._devices.split.mode is AllocationMode.SHARED
        return max(sizes) if is_shared else sum(sizes)

    def _warnings(self, others: Sequence[Neighbour]) -> Iterator[str]:
        """Yield what is served twice and is no accelerator."""
        alive = [other for other in others if other.is_alive]
        for other in alive:
            if both := [core for core in self._cores() if core in other.served.cores]:
                what = f"cores {both[0]} to {both[-1]}" if len(both) > 1 else f"core {both[0]}"
                yield f"{len(both)} of the cores ({what}) are served by {_named(other)} too"
        if (mine := self._memory_bytes()) and self._real_memory:
            total = mine + sum(other.served.memory for other in alive)
            if total > self._real_memory and any(other.served.memory for other in alive):
                who = ", ".join(_named(other) for other in alive if other.served.memory)
                yield (
                    f"memory is served by {who} too: {total} bytes in all,"
                    f" and the machine has {self._real_memory}"
                )


def _holds_any(kernel: Kernel | None) -> frozenset[DeviceId]:
    if kernel is None or not kernel.holds:
        return frozenset()
    ids = (share.device_id for share in kernel.allocation.shares)
    return frozenset(i for i in ids if i.name not in (CPU, MEM))


def _taken(others: Sequence[Neighbour]) -> dict[str, str]:
    """Return for every name of what others serve, or hold, why it is not ours."""
    taken: dict[str, str] = {}
    for other in others:
        why = f"served by {_named(other)}"
        if not other.is_alive:
            why = (
                f"held by kernels of {_named(other)}, which does not run;"
                " free when it is back and they have ended, or when the machine restarts"
            )
        for device in other.served.devices:
            if other.is_alive or device.held:
                for key in device.keys:
                    taken.setdefault(key, why)
    return taken


def _named(other: Neighbour) -> str:
    return f"agentd {other.node_id} ({other.user}, pid {other.pid})"
