"""The Protocols that the services require of plugins and runtimes, and the clocks."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Protocol

import msgspec
from msgspec.structs import replace

from agentd.core.allocation.ledger import Allocation
from agentd.core.conditions import Condition
from agentd.core.devices import Device
from agentd.core.kernel.edits import ContainerEdits
from agentd.core.kernel.exec_spec import ExecSpec
from agentd.core.kernel.observation import Listing, ObservedKernel
from agentd.core.kernel.plan import KernelPlan
from agentd.core.kernel.states import Kernel, KernelRef, KernelSpec, KernelState, Pull
from agentd.core.kernel.usage import UsageReading
from agentd.core.listings import restore_last_form
from agentd.core.partition.plugin_assignment import PluginAssignment
from agentd.core.slots import SlotType
from agentd.errors import Problem
from agentd.plugin_api import ConditionInfo, Features, Measurement


class PluginState(StrEnum):
    """The state of a plugin; `stopped` is by an operator."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"
    BLOCKED = "blocked"
    ABSENT = "absent"
    STOPPED = "stopped"


class PluginStatus(msgspec.Struct, frozen=True):
    """A plugin instance: its device name, its entry point and its status.

    Without a table it was loaded because it is installed, and its failure needs no warning. An
    `absent` one has found none of its hardware on this node.
    """

    name: str
    plugin: str
    state: PluginState
    reason: str = ""
    slots: tuple[str, ...] = ()
    has_table: bool = True
    is_serving: bool = True
    """Whether its devices are offered: also while it is restarted after a single failure."""

    @property
    def text(self) -> str:
        """State and reason; the reason of a stopped one says that."""
        if self.state is PluginState.STOPPED and self.reason:
            return self.reason
        return f"{self.state.value}: {self.reason}".rstrip(": ")


class PluginVitals(msgspec.Struct, frozen=True):
    """Restarts of a plugin, and seconds since it last listed its devices."""

    restarts: int
    listing_age_s: float | None


class PluginListing(msgspec.Struct, frozen=True):
    """The validated listing of a plugin, and its assignment of devices to agents, if any.

    One that `is_restored` is what a stopped plugin listed before agentd was restarted.
    """

    name: str
    slot_types: tuple[SlotType, ...]
    devices: tuple[Device, ...]
    assignment: PluginAssignment | None = None
    conditions: tuple[ConditionInfo, ...] = ()
    is_restored: bool = False

    def with_last_form(self, past: Iterable[Device]) -> PluginListing:
        """Return the listing in which unhealthy devices are what they were last."""
        slots = {slot.name for slot in self.slot_types}
        return replace(self, devices=tuple(restore_last_form(self.devices, past, slots)))


class Plugins(Protocol):
    """The accelerator plugins of this node."""

    def statuses(self) -> Sequence[PluginStatus]: ...

    def listings(self) -> Sequence[PluginListing]:
        """Return the listings of the plugins that have one, in order of precedence."""
        ...

    def measurements(self) -> Mapping[str, Sequence[Measurement]]:
        """Return the latest measurements, by device name."""
        ...

    def vitals(self) -> Mapping[str, PluginVitals]:
        """Return restarts and listing ages of the started plugins, by device name."""
        ...

    def conditions(self) -> Iterable[Condition]:
        """Return the conditions of plugins, and those that they report about their devices."""
        ...

    async def retry(self, name: str) -> PluginStatus:
        """Retry a plugin that is not ready and return its new status.

        Raises:
            UnknownPlugin: the plugin does not exist.
            Conflict: the plugin is blocked or stopped.
        """
        ...

    async def stop(self, name: str, reason: str) -> PluginStatus:
        """End a plugin's process until `start`; its listing stays known.

        Raises:
            UnknownPlugin: the plugin does not exist.
            Conflict: the plugin is blocked, or its process cannot be ended.
        """
        ...

    async def start(self, name: str) -> PluginStatus:
        """Start a stopped plugin and return its new status.

        Raises:
            UnknownPlugin: the plugin does not exist.
            Conflict: the plugin is blocked.
        """
        ...

    async def clear(self, name: str, stable_ids: Sequence[str]) -> None:
        """Clear what waits for an operator about a device, and list the devices again.

        Raises:
            UnknownPlugin: the plugin does not exist.
            Conflict: the plugin is blocked, or clears nothing.
            PluginUnavailable: the plugin does not answer, or failed to clear it.
        """
        ...

    def changes(self) -> AsyncIterator[str]:
        """Yield a plugin's name when its state or its devices changed after readiness."""
        ...

    def notify(self, step: str, kernel_id: str, allocation: Allocation) -> None:
        """Notify the plugins of an allocation of a step in its kernel's life, without waiting."""
        ...

    async def container_edits(self, allocation: Allocation, features: Features) -> ContainerEdits:
        """Return the edits that give a kernel its devices and hide all others.

        Raises:
            PluginUnavailable: a plugin of the kernel's devices did not answer.
        """
        ...


class CreateUndone(CancelledError):
    """A create was cancelled, and the runtime proved that nothing of it is left."""


class CreateProgress(Protocol):
    """A callback for the steps of a create and the progress of its pull."""

    def __call__(self, state: KernelState, pull: Pull | None = None) -> None: ...


class LogStream(StrEnum):
    """One of a kernel's two output streams."""

    STDOUT = "stdout"
    STDERR = "stderr"


class LogQuery(msgspec.Struct, frozen=True):
    """A log request: the last `tail` lines since a time (ns since the epoch), or from a position.

    A position is a number of bytes since the kernel began, of the selected streams and form.
    """

    follow: bool = False
    tail: int | None = None
    since_ns: int = 0
    timestamps: bool = False
    streams: frozenset[LogStream] = frozenset(LogStream)
    from_position: int | None = None


class KernelLog(msgspec.Struct, frozen=True):
    """An open log: the position of its first byte, and its bytes."""

    position: int
    chunks: AsyncGenerator[bytes]


class Support(msgspec.Struct, frozen=True):
    """The features of a runtime for one request on this node.

    `not_enforced` names slots and members of the request that the runtime cannot enforce.
    """

    features: Features
    not_enforced: frozenset[str] = frozenset()


class Session(Protocol):
    """An exec: a command in a running kernel."""

    def output(self) -> AsyncGenerator[tuple[int, bytes]]:
        """Yield output with its stream, until the command has ended and all of it was read."""
        ...

    async def write(self, data: bytes) -> None:
        """Write input; returns when there is room for more."""
        ...

    async def close_input(self) -> None:
        """Close the command's input."""
        ...

    async def resize(self, columns: int, rows: int) -> None:
        """Set the size of the terminal, if there is one."""
        ...

    async def send_signal(self, number: int) -> None: ...

    async def wait(self) -> int:
        """Wait for the end and return the exit code; 128 plus the number of a signal."""
        ...

    async def close(self) -> None:
        """End the command if it runs, and release everything."""
        ...


class Runtime(Protocol):
    """A runtime for kernels. Every implementation passes the suite in tests/contracts."""

    name: str
    minimum_memory_bytes: int
    members: frozenset[str]
    """Members of a request that it carries out; it is never asked for any other."""
    unlimited: str
    """The limits that new kernels lack although its agentd is root; "" for none."""

    @property
    def unready_reason(self) -> str:
        """Why no kernel can be created at the moment though it answers, "" if one can."""
        ...

    async def close(self) -> None: ...

    async def validate_spec(self, spec: KernelSpec) -> Sequence[Problem]:
        """Return the problems of a request on this runtime, before anything is decided.

        Raises:
            RuntimeUnavailable: a part of the host that the request names does not answer.
        """
        ...

    async def support(self, spec: KernelSpec) -> Support:
        """Return how this runtime attaches devices and what it cannot enforce.

        Raises:
            RuntimeUnavailable: that is unknown at the moment.
        """
        ...

    async def create(self, plan: KernelPlan, progress: CreateProgress) -> ObservedKernel:
        """Create and start a kernel.

        An AgentdError other than OutcomeUnknown, and CreateUndone, prove that nothing is left. Any
        other exception, including a bare cancellation, proves nothing once `creating` was reported.
        `creating` is reported before anything else runs after the runtime was called, `pulling`
        while there is nothing to undo.

        Raises:
            ImageNotFound, CommandNotFound: the image or command does not exist.
            ImageUnavailable: the image cannot be pulled now.
            StateUnavailable: a disk of the node is full.
            RuntimeFailure: the runtime refused.
            RuntimeUnavailable: the runtime could not be called.
            OutcomeUnknown: the runtime was called, and the answer was lost.
            CreateUndone: the create was cancelled.
        """
        ...

    async def stop(self, ref: KernelRef, timeout_s: float | None) -> None:
        """End a kernel, and kill it after `timeout_s` (None: the configured time).

        Returns when the kernel has ended; a kernel that does not exist has ended.
        """
        ...

    async def signal(self, ref: KernelRef, number: int) -> bool:
        """Send a signal to a kernel's first process; return False if that has ended."""
        ...

    async def remove(self, ref: KernelRef, *, unless_alive: bool = False) -> bool:
        """Remove a kernel, running or not; removing one that does not exist succeeds.

        With `unless_alive` a running kernel is left alone, and False is returned.
        """
        ...

    async def list_kernels(self) -> Listing:
        """Return every kernel of this node, including ended ones and remains of others.

        Raises:
            RuntimeUnavailable: a complete list is not available.
        """
        ...

    async def find(self, ref: KernelRef) -> ObservedKernel | None:
        """Return one kernel, whatever its current name if its handle is given.

        Returns:
            None only if the kernel is proved not to exist.

        Raises:
            RuntimeUnavailable: that is unknown at the moment.
        """
        ...

    def watch_events(self) -> AsyncIterator[str]:
        """Yield the id of each kernel with an event; "" asks for a complete list.

        "" comes once connected, and after a change of the ignored objects.

        Raises:
            RuntimeUnavailable: the connection could not be made, or broke.
        """
        ...

    async def start_exec(self, kernel: Kernel, spec: ExecSpec) -> Session:
        """Start a command in a running kernel, with the kernel's resources and no more.

        Raises:
            CommandNotFound, InvalidRequest: the command cannot run as requested.
            KernelConflict: the kernel is not running.
            RuntimeFailure, RuntimeUnavailable: the runtime refused, or did not answer.
        """
        ...

    async def usages(self, kernels: Sequence[Kernel]) -> Mapping[str, UsageReading]:
        """Return the usage of kernels by id; for ended ones as far as still known.

        Kernels without any known usage may be missing.

        Raises:
            RuntimeUnavailable: that is unknown at the moment.
        """
        ...

    def logs(self, ref: KernelRef, query: LogQuery) -> AbstractAsyncContextManager[KernelLog]:
        """Open a kernel's output, byte for byte; leaving the context releases everything.

        It begins at the oldest byte that is kept, if the requested one is not, and has no gaps.

        Raises:
            InvalidRequest: this runtime does not keep the requested part.
            RuntimeUnavailable: the output cannot be read; also later, and where it has a gap.
        """
        ...


class Clock(msgspec.Struct, frozen=True):
    """Clocks. `wall`: seconds since the epoch. `steady`: monotonic seconds.

    `uptime`: seconds since the boot, a suspend included.
    """

    wall: Callable[[], float]
    steady: Callable[[], float]
    uptime: Callable[[], float]
