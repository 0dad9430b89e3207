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
from agentd.core.kernel.usage import UNKNOWN_USAGE, Usage, UsageReading
from agentd.core.slots import CPU, MEM
from agentd.errors import RuntimeFailure, RuntimeUnavailable
from agentd.plugin_api import Measurement
from agentd.services.node import Node
from agentd.services.protocols import Clock, Plugins, Runtime

MAX_AGE_S = 1.0
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


class _DeviceUser(msgspec.Struct, frozen=True):
    """A process on a device: its cgroups and its memory there."""

    groups: frozenset[str]
    memory_bytes: int | None


_Key: TypeAlias = tuple[str, str, float]
"""Identifies a kernel over time: another one may reuse its id."""

_Device: TypeAlias = tuple[str, str]
"""A device's name and stable id; plugins do not share device names."""
_Measurements: TypeAlias = Mapping[_Device, Measurement]


def _key(kernel: Kernel) -> _Key:
    return kernel.kernel_id, kernel.agent_id, kernel.created_at


class Statistics:
    """Reads the usage of the node's kernels, at most once in `MAX_AGE_S`."""

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
        self._reading_lock = asyncio.Lock()
        self._read_at = float("-inf")
        self._usages: Mapping[_Key, KernelUse] = {}

    async def read(self, kernels: Iterable[Kernel]) -> list[KernelUse]:
        """Return the usage of these kernels, in order; it is unknown for very new kernels."""
        requested = list(kernels)
        if not requested:
            return []
        async with self._reading_lock:
            if self._clock.steady() - self._read_at >= MAX_AGE_S:
                self._usages = await self._read_usages()
                self._read_at = self._clock.steady()
        now, usages = self._clock.wall(), self._usages
        return [
            usages.get(_key(k))
            or KernelUse(k.kernel_id, k.agent_id, k.state, now, UNKNOWN_USAGE, ())
            for k in requested
        ]

    async def _read_usages(self) -> dict[_Key, KernelUse]:
        now = self._clock.wall()
        kernels = list(self._state)
        readings: dict[str, UsageReading] = {}
        for name, runtime in self._runtimes.items():
            own_kernels = [kernel for kernel in kernels if kernel.runtime == name]
            if own_kernels:
                with suppress(RuntimeUnavailable, RuntimeFailure):
                    readings |= await runtime.usages(own_kernels)
        listings = self._plugins.measurements().items()
        measurements = {(name, item.stable_id): item for name, items in listings for item in items}
        users = await asyncio.to_thread(self._device_users, measurements)
        return {
            _key(kernel): self._kernel_use(
                kernel, readings.get(kernel.kernel_id, UsageReading()), measurements, users, now
            )
            for kernel in kernels
        }

    def _device_users(self, measurements: _Measurements) -> dict[_Device, list[_DeviceUser]]:
        """Return the processes on each device, where the driver reports them."""
        return {
            key: [
                _DeviceUser(frozenset(self._groups_of(process.pid)), process.memory_bytes)
                for process in item.processes
            ]
            for key, item in measurements.items()
            if item.processes is not None
        }

    def _kernel_use(
        self,
        kernel: Kernel,
        reading: UsageReading,
        measurements: _Measurements,
        users: Mapping[_Device, Sequence[_DeviceUser]],
        now: float,
    ) -> KernelUse:
        by_id = self._devices.inventory.by_id
        shares = kernel.allocation.shares if kernel.holds_devices else ()
        devices = tuple(
            _device_use(
                share,
                by_id.get(share.device_id),
                measurements.get((share.device_id.name, share.stable_id)),
                users.get((share.device_id.name, share.stable_id)),
                reading.groups,
            )
            for share in shares
            if share.device_id.name not in (CPU, MEM)
        )
        usage = reading.usage
        if kernel.state in ENDED:  # an ended kernel's cgroup still has its page cache
            usage = replace(usage, memory_bytes=None, processes=None)
        return KernelUse(kernel.kernel_id, kernel.agent_id, kernel.state, now, usage, devices)


def _device_use(
    share: Share,
    device: Device | None,
    measurement: Measurement | None,
    users: Sequence[_DeviceUser] | None,
    groups: frozenset[str],
) -> DeviceUse:
    percent = measurement.utilization_percent if measurement else None
    return DeviceUse(
        device_name=share.device_id.name,
        id=share.device_id.id,
        share=_share_fraction(share.amount, device.capacity if device else 0),
        utilization=None if percent is None else percent / 100,
        memory_used_bytes=measurement.memory_used_bytes if measurement else None,
        used_by_kernel_bytes=_kernel_memory(groups, users),
        power_watts=measurement.power_w if measurement else None,
    )


def _share_fraction(amount: int, capacity: int) -> Decimal:
    if not amount or not capacity:  # held whole
        return Decimal(1)
    return (Decimal(amount) / Decimal(capacity)).quantize(_SHARE_DIGITS).normalize()


def _kernel_memory(groups: frozenset[str], users: Sequence[_DeviceUser] | None) -> int | None:
    """Return the memory of the processes in a kernel's cgroups; None if unknown."""
    if users is None or not groups:
        return None
    amounts = [user.memory_bytes for user in users if _is_within(user.groups, groups)]
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None


def _is_within(inner: frozenset[str], outer: frozenset[str]) -> bool:
    """Return whether a process is in one of the groups or below: a kernel may create some."""
    return any(group == top or group.startswith(f"{top}/") for group in inner for top in outer)
