"""What the services need from the outside, and nothing about how it is done."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from agentd.core.allocation import Allocation
from agentd.core.container_edits import ContainerEdits
from agentd.core.devices import Device, DeviceId
from agentd.core.kernel import KernelSpec, KernelState, Pull
from agentd.core.plan import KernelPlan
from agentd.core.reconcile import FoundKernel
from agentd.core.slots import SlotType
from agentd.plugin_api import Features, Measurement


class PluginState(StrEnum):
    """Where a plugin is: only a `ready` one has slots."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"
    BLOCKED = "blocked"


@dataclass(frozen=True, slots=True)
class PluginStatus:
    """A plugin instance: its device name, its entry point, and how it does.

    One without a table was loaded because it is installed; nobody misses it where it fails.
    """

    name: str
    plugin: str
    state: PluginState
    reason: str = ""
    slots: tuple[str, ...] = ()
    has_table: bool = True


@dataclass(frozen=True, slots=True)
class PluginListing:
    """What a plugin offers, checked."""

    name: str
    slot_types: tuple[SlotType, ...]
    devices: tuple[Device, ...]


class Plugins(Protocol):
    """The accelerator plugins of this node."""

    def statuses(self) -> Sequence[PluginStatus]: ...

    def listings(self) -> Sequence[PluginListing]:
        """Return what the ready plugins offer, in the order in which they take precedence."""
        ...

    def measurements(self) -> Mapping[str, Sequence[Measurement]]:
        """Return what was last measured, by device name."""
        ...

    def changes(self) -> AsyncIterator[str]:
        """Yield a plugin's name when its state or its devices changed after readiness."""
        ...

    def tell(
        self, step: str, kernel_id: str, allocation: Allocation, stable_ids: Mapping[DeviceId, str]
    ) -> None:
        """Let the plugins of an allocation know of a step in its kernel's life; waits for none."""
        ...

    async def container_edits(
        self, allocation: Allocation, stable_ids: Mapping[DeviceId, str], features: Features
    ) -> ContainerEdits:
        """Return what a kernel needs for its devices, and what hides all others from it.

        Raises:
            PluginUnavailable: a plugin whose devices it holds did not answer.
        """
        ...


class Progress(Protocol):
    """Hears of the steps of a create, and while it pulls, how far that is."""

    def __call__(self, state: KernelState, pull: Pull | None = None) -> None: ...


class LogStream(StrEnum):
    """Which of a kernel's two streams."""

    STDOUT = "stdout"
    STDERR = "stderr"


@dataclass(frozen=True, slots=True)
class LogQuery:
    """What of a log is wanted: the last `tail` lines, of those since a time (ns, the epoch)."""

    follow: bool = False
    tail: int | None = None
    since_ns: int = 0
    timestamps: bool = False
    streams: frozenset[LogStream] = frozenset(LogStream)


class Runtime(Protocol):
    """What runs kernels. The contract suite in tests/contracts holds every one to this."""

    name: str
    minimum_memory_bytes: int

    def unenforced(self, spec: KernelSpec) -> frozenset[str]:
        """Return what of a request this runtime cannot hold a kernel to on this node.

        Names of slots and members of the request; asked after `features`.
        """
        ...

    async def close(self) -> None: ...

    async def features(self) -> Features:
        """Return the ways to devices that this runtime takes.

        Raises:
            RuntimeUnavailable: that cannot be told now.
        """
        ...

    async def check(self, spec: KernelSpec) -> None:
        """Refuse what this runtime cannot do, before anything is decided.

        Raises:
            InvalidRequest: with every reason.
        """
        ...

    async def create(self, plan: KernelPlan, progress: Progress) -> FoundKernel:
        """Create and start a kernel; if this raises anything but OutcomeUnknown, nothing is left.

        Raises:
            ImageNotFound, CommandNotFound: the request named what does not exist.
            RuntimeFailure: the runtime refused.
            RuntimeUnavailable: it could not be asked.
            OutcomeUnknown: it was asked, and the answer was lost.
        """
        ...

    async def stop(self, kernel_id: str, handle: str, timeout_s: float | None) -> None:
        """Ask the kernel to end, kill it after `timeout_s` (None: the configured time).

        Returns when it has ended; a kernel that is not there has.
        """
        ...

    async def remove(self, kernel_id: str, handle: str) -> None:
        """Remove what is left of a kernel, running or not; one that is not there is removed."""
        ...

    async def list(self) -> Sequence[FoundKernel]:
        """Return every kernel of this node, ended ones too.

        Raises:
            RuntimeUnavailable: there is no complete list to be had.
        """
        ...

    async def strays(self, known: Collection[str]) -> Sequence[str]:
        """Return, in words, what is left here of kernels other than these.

        Whole kernels apart: those are in the list.

        Raises:
            RuntimeUnavailable: that cannot be told now.
        """
        ...

    async def discard(self, kernel_id: str, handle: str) -> bool:
        """Remove a kernel that never ran; False, and nothing done, if it runs after all."""
        ...

    async def find(self, kernel_id: str, handle: str | None = None) -> FoundKernel | None:
        """Return one kernel, under whatever name it goes now if its handle is given.

        None only if it is proved not to be there.

        Raises:
            RuntimeUnavailable: that cannot be told now.
        """
        ...

    def follow(self) -> AsyncIterator[str]:
        """Yield the id of each kernel that something happened to; "" once connected.

        Raises:
            RuntimeUnavailable: the connection could not be made, or broke.
        """
        ...

    def logs(self, kernel_id: str, handle: str, query: LogQuery) -> AsyncIterator[bytes]:
        """Yield what the kernel printed, byte for byte.

        Raises:
            InvalidRequest: this runtime does not keep what the query asks for.
        """
        ...


@dataclass(frozen=True, slots=True)
class Intent:
    """A create that a runtime was, or is about to be, asked for; `record` as on the kernel.

    `runtime` is empty, and `record` none, where what was written down cannot be read.
    """

    kernel_id: str
    runtime: str
    record: str


class Memory(Protocol):
    """What the node remembers over restarts besides its kernels."""

    def load_devices(self) -> Sequence[Device]:
        """Return the devices of the last inventory, with what operators said of them."""
        ...

    def save_devices(self, devices: Sequence[Device]) -> None:
        """Remember an inventory; StateUnavailable if the last one is still remembered."""
        ...

    def load_intents(self) -> Sequence[Intent]:
        """Return the creates that no daemon saw the end of."""
        ...

    def save_intent(self, intent: Intent) -> None:
        """Remember a create before it is asked for; StateUnavailable if that cannot be."""
        ...

    def drop_intent(self, kernel_id: str) -> None:
        """Forget a create; where that cannot be, `settle` tries again."""
        ...

    def settle(self) -> None: ...

    def warnings(self) -> Sequence[str]:
        """Return what an operator should know of this memory."""
        ...


class Clock(NamedTuple):
    """`wall`: seconds since the epoch, as set by people. `steady`: seconds that only pass."""

    wall: Callable[[], float]
    steady: Callable[[], float]
