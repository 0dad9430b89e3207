"""The usage of kernels: values of their cgroups and measurements of their devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from agentd.core.allocation.ledger import Share
from agentd.core.devices import Device
from agentd.core.kernel.states import ENDED, Kernel, KernelState
from agentd.core.kernel.usage import UNKNOWN, Usage, UsageReading
from agentd.core.slots import CPU, MEM
from agentd.errors import RuntimeFailure, RuntimeUnavailable
from agentd.plugin_api import Measurement
from agentd.services.node import Node
from agentd.services.protocols import Clock, Plugins, Runtime

FRESH_S = 1.0
"""Maximum age in seconds of cached usage, which concurrent clients share."""
_SHARE_DIGITS = Decimal("0.000001")


class DeviceUse(msgspec.Struct, frozen=True):
    """The usage of a device that a kernel holds a share of; None means unknown.

    `share` is a fraction of the whole device. Utilization (0 to 1), memory and power are those of
    the whole device; `used_by_kernel_bytes` is the memory of this kernel.
    """

    device_name: str
    id: str
    share: Decimal
    utilization: float | None = None
    memory_used_bytes: int | None = None
    used_by_kernel_bytes: int | None = None
    power_watts: float | None = None


class KernelUse(msgspec.Struct, frozen=True):
    """The usage of a kernel and its devices at a time (seconds since the epoch)."""

    kernel_id: str
    agent_id: str
    state: KernelState
    at: float
    usage: Usage
    devices: tuple[DeviceUse, ...]


class _User(msgspec.Struct, frozen=True):
    """A process on a device: its cgroups and its memory there."""

    groups: frozenset[str]
    memory_bytes: int | None


_Key: TypeAlias = tuple[str, str, float]
"""Identifies a kernel over time: another one may reuse its id."""

_Device: TypeAlias = tuple[str, str]
"""A device's name and stable id; plugins do not share device names."""
_Measured: TypeAlias = Mapping[_Device, Measurement]


def _key(kernel: Kernel) -> _Key:
    return kernel.kernel_id, kernel.agent_id, kernel.created_at


class Statistics:
    """Reads the usage of the node's kernels, at most once in `FRESH_S`."""

    def __init__(
        self,
        node: Node,
        runtimes: Mapping[str, Runtime],
        plugins: Plugins,
        clock: Clock,
        groups_of: Callable[[int], Collection[str]],
    ) -> None:
        """Create the reader; `groups_of` returns a process's cgroups like `UsageReading.groups`."""
        self._state, self._devices = node.state, node.devices
        self._runtimes = runtimes
        self._plugins = plugins
        self._clock = clock
        self._groups_of = groups_of
        self._looking = asyncio.Lock()
        self._looked_at = float("-inf")
        self._found: Mapping[_Key, KernelUse] = {}

    async def of(self, kernels: Iterable[Kernel]) -> list[KernelUse]:
        """Return the usage of these kernels, in order; it is unknown for very new kernels."""
        wanted = list(kernels)
        if not wanted:
            return []
        async with self._looking:
            if self._clock.steady() - self._looked_at >= FRESH_S:
                self._found = await self._look()
                self._looked_at = self._clock.steady()
        now, found = self._clock.wall(), self._found
        return [
            found.get(_key(k)) or KernelUse(k.kernel_id, k.agent_id, k.state, now, UNKNOWN, ())
            for k in wanted
        ]

    async def _look(self) -> dict[_Key, KernelUse]:
        now = self._clock.wall()
        kernels = list(self._state)
        accounted: dict[str, UsageReading] = {}
        for name, runtime in self._runtimes.items():
            mine = [kernel for kernel in kernels if kernel.runtime == name]
            if mine:
                with suppress(RuntimeUnavailable, RuntimeFailure):
                    accounted |= await runtime.usages(mine)
        listed = self._plugins.measurements().items()
        measured = {(name, item.stable_id): item for name, items in listed for item in items}
        users = await asyncio.to_thread(self._users, measured)
        return {
            _key(kernel): self._use(
                kernel, accounted.get(kernel.kernel_id, UsageReading()), measured, users, now
            )
            for kernel in kernels
        }

    def _users(self, measured: _Measured) -> dict[_Device, list[_User]]:
        """Return the processes on each device, where the driver reports them."""
        return {
            key: [
                _User(frozenset(self._groups_of(process.pid)), process.memory_bytes)
                for process in item.processes
            ]
            for key, item in measured.items()
            if item.processes is not None
        }

    def _use(
        self,
        kernel: Kernel,
        accounted: UsageReading,
        measured: _Measured,
        users: Mapping[_Device, Sequence[_User]],
        now: float,
    ) -> KernelUse:
        by_id = self._devices.inventory.by_id
        shares = kernel.allocation.shares if kernel.holds else ()
        devices = tuple(
            _device_use(
                share,
                by_id.get(share.device_id),
                measured.get((share.device_id.name, share.stable_id)),
                users.get((share.device_id.name, share.stable_id)),
                accounted.groups,
            )
            for share in shares
            if share.device_id.name not in (CPU, MEM)
        )
        usage = accounted.usage
        if kernel.state in ENDED:  # an ended kernel's cgroup still has its page cache
            usage = replace(usage, memory_bytes=None, processes=None)
        return KernelUse(kernel.kernel_id, kernel.agent_id, kernel.state, now, usage, devices)


def _device_use(
    share: Share,
    device: Device | None,
    measured: Measurement | None,
    users: Sequence[_User] | None,
    groups: frozenset[str],
) -> DeviceUse:
    percent = measured.utilization_percent if measured else None
    return DeviceUse(
        share.device_id.name,
        share.device_id.id,
        _part(share.amount, device.capacity if device else 0),
        None if percent is None else percent / 100,
        measured.memory_used_bytes if measured else None,
        _memory_of(groups, users),
        measured.power_w if measured else None,
    )


def _part(amount: int, capacity: int) -> Decimal:
    if not amount or not capacity:  # held whole
        return Decimal(1)
    return (Decimal(amount) / Decimal(capacity)).quantize(_SHARE_DIGITS).normalize()


def _memory_of(groups: frozenset[str], users: Sequence[_User] | None) -> int | None:
    """Return the memory of the processes in a kernel's cgroups; None if unknown."""
    if users is None or not groups:
        return None
    mine = [user.memory_bytes for user in users if _is_within(user.groups, groups)]
    known = [amount for amount in mine if amount is not None]
    return sum(known) if len(known) == len(mine) else None


def _is_within(inner: frozenset[str], outer: frozenset[str]) -> bool:
    """Return whether a process is in one of the groups or below: a kernel may create some."""
    return any(group == top or group.startswith(f"{top}/") for group in inner for top in outer)
