"""What this node serves, beside other daemons of the machine: no accelerator twice.

Only what can be given to an agent, or is held, is claimed. What another daemon serves is
withheld here for as long as it does, with its place kept; cores and memory that others serve
too are a warning alone, as an operator may well want that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentd.core.claim.claim import Claim
from agentd.core.devices import Device, DeviceId
from agentd.core.kernel.states import Kernel
from agentd.core.partition.rules import AllocationMode
from agentd.core.partition.split import Split
from agentd.core.slots import CPU, MEM
from agentd.services.devices import NodeDevices
from agentd.services.protocols import Peer, Peers, Served, ServedDevice
from agentd.services.state import NodeState

UPDATE_PATIENCE_S, LOOK_PATIENCE_S = 0.05, 1.0
"""How long others may keep a decision from being made: while everything waits, and beside it."""
_UNDECIDED = "waiting for another agentd on this host"


@dataclass(frozen=True)
class _Wish:
    """What this node would serve, were it alone; `kept` are entries of devices not listed yet."""

    devices: Mapping[DeviceId, ServedDevice]
    kept: tuple[ServedDevice, ...]
    cores: tuple[str, ...]
    memory: int


@dataclass(frozen=True)
class _Decision:
    """What is served, and why the rest is not."""

    served: tuple[ServedDevice, ...]
    withheld: Mapping[DeviceId, str]
    others: tuple[Peer, ...]


class SharedDevices:
    """Keeps the devices of a node apart from those that others serve.

    `real_cores` and `real_memory` are what the machine has of what is not declared: nobody
    knows whether declared cores are the same as another daemon's.
    """

    def __init__(
        self,
        devices: NodeDevices,
        state: NodeState,
        peers: Peers,
        real_cores: Iterable[str],
        real_memory: int | None,
    ) -> None:
        self._devices = devices
        self._state = state
        self._peers = peers
        self._real_cores = frozenset(real_cores)
        self._real_memory = real_memory
        before = peers.own()
        self._before = tuple(d for d in before.devices if d.held) if before else ()
        self._served: tuple[ServedDevice, ...] = ()
        self._changes = 0
        self._is_over = False
        state.listen(self._changed)
        state.listen_to_claims(self._claim_changed)

    def update(self, patience_s: float = UPDATE_PATIENCE_S) -> None:
        """Decide anew what this node serves, before anybody asks for a device.

        To be called after every change of the devices; what cannot be decided in time is
        withheld for now.
        """
        if not self._is_over:
            self._changes += 1
            wish = self._wish()
            self._take(wish, self._decided(wish, patience_s=patience_s))

    async def look(self) -> None:
        """Decide anew, as others may have come or gone; holds up nobody meanwhile."""
        if self._is_over:
            return
        wish, changes = self._wish(), self._changes
        decision = await asyncio.to_thread(self._decided, wish, patience_s=LOOK_PATIENCE_S)
        if changes == self._changes and not self._is_over:
            self._take(wish, decision)
        else:
            self.update()

    def close(self) -> None:
        """Serve nothing any more but what kernels hold."""
        self._is_over = True
        self._peers.publish(Served((*self._kept(), *self._held())))

    def _decided(self, wish: _Wish, *, patience_s: float) -> _Decision:
        with self._peers.deciding(patience_s) as may_decide:
            others = tuple(self._peers.others())
            withheld = taken_by_others(wish.devices, others)
            if not may_decide:
                mine = {device.name for device in self._served}
                new = [i for i in wish.devices if str(i) not in mine and i not in withheld]
                withheld |= dict.fromkeys(new, _UNDECIDED)
            served = (
                *wish.kept,
                *(d for i, d in wish.devices.items() if d.held or i not in withheld),
            )
            self._peers.publish(Served(served, wish.cores, wish.memory))
        return _Decision(served, withheld, others)

    def _take(self, wish: _Wish, decision: _Decision) -> None:
        self._served = decision.served
        remarks = [*self._remarks(wish, decision.others), *self._peers.warnings()]
        self._devices.withhold(decision.withheld, tuple(remarks))

    def _changed(self, before: Kernel | None, now: Kernel | None) -> None:
        """Say which devices are held, before anything is started on them."""
        if self._is_over or _holds_the_same(before, now):
            return
        if not self._served and not _accelerators_of(now):
            return
        self._publish()

    def _claim_changed(self, before: Claim | None, now: Claim | None) -> None:
        """Publish which devices are held, before a claim is answered."""
        is_same = before is not None and now is not None and before.allocation == now.allocation
        if not (self._is_over or is_same):
            self._publish()

    def _publish(self) -> None:
        self._changes += 1
        wish = self._wish()
        served = {device.name for device in self._served}
        now_served = [d for d in wish.devices.values() if d.held or d.name in served]
        self._served = (*wish.kept, *now_served)
        self._peers.publish(Served(self._served, wish.cores, wish.memory))

    def _wish(self) -> _Wish:
        devices = {device.device_id: self._as_served(device) for device in self._wanted()}
        return _Wish(devices, self._kept(), self._cores(), self._memory_bytes())

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
        held = device.device_id in self._state.ledger.held
        held = held or any(not keys.isdisjoint(d.keys) for d in self._held_before())
        return ServedDevice(str(device.device_id), tuple(sorted(keys)), held)

    def _held(self) -> list[ServedDevice]:
        return [device for device in map(self._as_served, self._wanted()) if device.held]

    def _held_before(self) -> tuple[ServedDevice, ...]:
        """Return what was held before the start, until it is known what is."""
        if self._before and self._state.is_listed:
            self._before = ()
        return self._before

    def _kept(self) -> tuple[ServedDevice, ...]:
        """Return what was held before the start of devices that nobody has listed yet."""
        known = {key for device in self._wanted() for key in device.physical_keys()}
        return tuple(d for d in self._held_before() if known.isdisjoint(d.keys))

    def _cores(self) -> tuple[str, ...]:
        given = _given(self._devices.split, CPU) & self._real_cores
        return tuple(sorted(given, key=int))

    def _memory_bytes(self) -> int:
        if self._real_memory is None:
            return 0
        sizes = [part.memory_bytes for part in self._devices.split.partitions.values()]
        return max(sizes) if self._devices.split.mode is AllocationMode.SHARED else sum(sizes)

    def _remarks(self, wish: _Wish, others: Sequence[Peer]) -> Iterator[str]:
        """Yield what is served twice and is no accelerator."""
        alive = [other for other in others if other.is_alive]
        for other in alive:
            if both := [core for core in wish.cores if core in other.served.cores]:
                what = f"cores {both[0]} to {both[-1]}" if len(both) > 1 else f"core {both[0]}"
                yield f"{len(both)} of the cores ({what}) are served by {_named(other)} too"
        with_memory = [other for other in alive if other.served.memory]
        total = wish.memory + sum(other.served.memory for other in with_memory)
        if wish.memory and with_memory and self._real_memory and total > self._real_memory:
            who = ", ".join(map(_named, with_memory))
            has = f"{total} bytes in all, and the machine has {self._real_memory}"
            yield f"memory is served by {who} too: {has}"


def claimable(devices: NodeDevices) -> dict[DeviceId, ServedDevice]:
    """Return the accelerators that agents have, as they would be told to others."""
    return {
        device.device_id: ServedDevice(
            str(device.device_id), tuple(sorted(device.physical_keys())), held=False
        )
        for device in devices.inventory.devices
        if device.device_id.name not in (CPU, MEM)
        and not device.is_simulated
        and devices.split.agents_of(device.device_id)
    }


def _given(split: Split, name: str) -> frozenset[str]:
    return frozenset(
        device_id.id
        for partition in split.partitions.values()
        for device_id in partition.members
        if device_id.name == name
    )


def _holds_the_same(before: Kernel | None, now: Kernel | None) -> bool:
    if before is not None and now is not None and now.allocation is before.allocation:
        return now.holds is before.holds
    return _accelerators_of(before) == _accelerators_of(now)


def _accelerators_of(kernel: Kernel | None) -> frozenset[DeviceId]:
    if kernel is None or not kernel.holds:
        return frozenset()
    ids = (share.device_id for share in kernel.allocation.shares)
    return frozenset(i for i in ids if i.name not in (CPU, MEM))


def taken_by_others(
    devices: Mapping[DeviceId, ServedDevice], others: Sequence[Peer]
) -> dict[DeviceId, str]:
    """Return which of these devices others serve, or hold, and who."""
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
    found: dict[DeviceId, str] = {}
    for device_id, device in devices.items():
        reasons = (taken[key] for key in device.keys if key in taken)
        if (reason := next(reasons, None)) is not None:
            found[device_id] = reason
    return found


def _named(other: Peer) -> str:
    return f"agentd {other.node_id} ({other.user}, pid {other.pid})"
