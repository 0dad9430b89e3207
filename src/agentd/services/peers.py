"""Coordination with other daemons on the host: no accelerator is served twice.

Only devices that an agent can get, or that are held, are claimed. A device that another daemon
serves is withheld and keeps its position. Sharing cores and memory is only a warning, since an
operator may intend it.
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
"""Seconds to wait for the peers' lock: with everything blocked, and in the background."""
_UNDECIDED = "waiting for another agentd on this host"


@dataclass(frozen=True)
class _Wish:
    """The claim of this node if it were alone; `kept` are devices that are not listed yet."""

    devices: Mapping[DeviceId, ServedDevice]
    kept: tuple[ServedDevice, ...]
    cores: tuple[str, ...]
    memory: int


@dataclass(frozen=True)
class _Decision:
    """The devices that this node serves, and why it withholds the others."""

    served: tuple[ServedDevice, ...]
    withheld: Mapping[DeviceId, str]
    others: tuple[Peer, ...]


class SharedDevices:
    """Keeps this node from serving devices that its peers serve.

    `real_cores` and `real_memory` are the undeclared resources of the host. Declared cores cannot
    be compared with those of another daemon.
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
        state.listen_to_claims(self._changed)

    def update(self, patience_s: float = UPDATE_PATIENCE_S) -> None:
        """Decide which devices this node serves, before any of them is allocated.

        Call it after every change of the devices. Devices that cannot be decided in time are
        withheld.
        """
        if not self._is_over:
            self._changes += 1
            wish = self._wish()
            self._take(wish, self._decided(wish, patience_s=patience_s))

    async def look(self) -> None:
        """Decide again in the background, since peers start and stop."""
        if self._is_over:
            return
        wish, changes = self._wish(), self._changes
        decision = await asyncio.to_thread(self._decided, wish, patience_s=LOOK_PATIENCE_S)
        if changes == self._changes and not self._is_over:
            self._take(wish, decision)
        else:
            self.update()

    def close(self) -> None:
        """Give up all devices that no kernel holds."""
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

    def _changed(self, before: Kernel | Claim | None, now: Kernel | Claim | None) -> None:
        """Publish which devices are held before a kernel starts on them, or a claim is answered."""
        if self._is_over or _holds_the_same(before, now):
            return
        if self._accelerators_of(before) != self._accelerators_of(now):
            self._publish()

    def _accelerators_of(self, holder: Kernel | Claim | None) -> frozenset[DeviceId]:
        """Return the devices of a holder that concern other daemons."""
        if holder is None or not _holds(holder):
            return frozenset()
        by_id = self._devices.inventory.by_id
        ids = (share.device_id for share in holder.allocation.shares)
        return frozenset(
            i
            for i in ids
            if i.name not in (CPU, MEM) and not (i in by_id and by_id[i].is_simulated)
        )

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
        """Yield the accelerators that an agent can get, or that a kernel holds."""
        split, held = self._devices.split, self._state.ledger.held
        given = split.members
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
        """Return the devices held before the start, until every runtime has been listed."""
        if self._before and self._state.is_listed:
            self._before = ()
        return self._before

    def _kept(self) -> tuple[ServedDevice, ...]:
        """Return the devices held before the start that no plugin has listed yet."""
        if not (before := self._held_before()):
            return ()
        known = {key for device in self._wanted() for key in device.physical_keys()}
        return tuple(d for d in before if known.isdisjoint(d.keys))

    def _cores(self) -> tuple[str, ...]:
        given = _given(self._devices.split, CPU) & self._real_cores
        return tuple(sorted(given, key=int))

    def _memory_bytes(self) -> int:
        if self._real_memory is None:
            return 0
        sizes = [part.memory_bytes for part in self._devices.split.partitions.values()]
        return max(sizes) if self._devices.split.mode is AllocationMode.SHARED else sum(sizes)

    def _remarks(self, wish: _Wish, others: Sequence[Peer]) -> Iterator[str]:
        """Yield warnings about cores and memory that peers serve, too."""
        alive = [other for other in others if other.is_alive]
        for other in alive:
            if both := [core for core in wish.cores if core in other.served.cores]:
                what = f"cores {both[0]} to {both[-1]}" if len(both) > 1 else f"core {both[0]}"
                yield f"{len(both)} cores ({what}) are also served by {_named(other)}"
        with_memory = [other for other in alive if other.served.memory]
        total = wish.memory + sum(other.served.memory for other in with_memory)
        if wish.memory and with_memory and self._real_memory and total > self._real_memory:
            who = ", ".join(map(_named, with_memory))
            has = f"{total} bytes in total, {self._real_memory} on this host"
            yield f"memory is also served by {who}: {has}"


def claimable(devices: NodeDevices) -> dict[DeviceId, ServedDevice]:
    """Return the accelerators that agents have, as published to peers."""
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


def _holds_the_same(before: Kernel | Claim | None, now: Kernel | Claim | None) -> bool:
    """Return whether a change obviously leaves the devices alone."""
    if before is None or now is None or now.allocation is not before.allocation:
        return False
    return _holds(now) is _holds(before)


def _holds(holder: Kernel | Claim) -> bool:
    return isinstance(holder, Claim) or holder.holds


def taken_by_others(
    devices: Mapping[DeviceId, ServedDevice], others: Sequence[Peer]
) -> dict[DeviceId, str]:
    """Return the devices that peers serve or hold, each with the reason."""
    taken: dict[str, str] = {}
    for other in others:
        why = f"served by {_named(other)}"
        if not other.is_alive:
            why = (
                f"held by kernels of {_named(other)}, which is not running;"
                " released after it restarts and they end, or after a reboot"
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
