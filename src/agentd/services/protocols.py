"""The Protocols that the services require of plugins, runtimes, store and clock."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import msgspec

from agentd.core.allocation.allocator import Allocation
from agentd.core.devices import Device
from agentd.core.kernel.edits import ContainerEdits
from agentd.core.kernel.exec_spec import ExecSpec
from agentd.core.kernel.observation import Listing, ObservedKernel
from agentd.core.kernel.plan import KernelPlan
from agentd.core.kernel.states import Kernel, KernelRef, KernelSpec, KernelState, Pull
from agentd.core.kernel.usage import UsageReading
from agentd.core.partition.dealing import Dealing
from agentd.core.slots import SlotType
from agentd.errors import Problem
from agentd.plugin_api import Features, Measurement


class PluginState(StrEnum):
    """Where a plugin is: only a `ready` one has slots."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"
    BLOCKED = "blocked"
    ABSENT = "absent"


class PluginStatus(msgspec.Struct, frozen=True):
    """A plugin instance: its device name, its entry point, and how it does.

    One without a table was loaded because it is installed; nobody misses it where it fails. An
    absent one says that this node has none of its hardware.
    """

    name: str
    plugin: str
    state: PluginState
    reason: str = ""
    slots: tuple[str, ...] = ()
    has_table: bool = True


class PluginVitals(NamedTuple):
    """How often a plugin was started anew, and how many seconds ago it last told its devices."""

    restarts: int
    listed_s: float | None


class PluginListing(msgspec.Struct, frozen=True):
    """What a plugin offers, checked; `dealing` if it deals its devices to the agents."""

    name: str
    slot_types: tuple[SlotType, ...]
    devices: tuple[Device, ...]
    dealing: Dealing | None = None


class Plugins(Protocol):
    """The accelerator plugins of this node."""

    def statuses(self) -> Sequence[PluginStatus]: ...

    def listings(self) -> Sequence[PluginListing]:
        """Return what the ready plugins offer, in the order in which they take precedence."""
        ...

    def measurements(self) -> Mapping[str, Sequence[Measurement]]:
        """Return what was last measured, by device name."""
        ...

    def vitals(self) -> Mapping[str, PluginVitals]:
        """Return how the plugins that run, or are to run, did so far, by device name."""
        ...

    def warnings(self) -> Sequence[str]:
        """Return what an operator should know of what is installed."""
        ...

    async def retry(self, name: str) -> PluginStatus:
        """Have a plugin that is not ready tried again now; return how that went.

        Raises:
            UnknownPlugin: there is none of that name.
            Conflict: it is blocked.
        """
        ...

    def changes(self) -> AsyncIterator[str]:
        """Yield a plugin's name when its state or its devices changed after readiness."""
        ...

    def notify(self, step: str, kernel_id: str, allocation: Allocation) -> None:
        """Let the plugins of an allocation know of a step in its kernel's life; waits for none."""
        ...

    async def container_edits(self, allocation: Allocation, features: Features) -> ContainerEdits:
        """Return what a kernel needs for its devices, and what hides all others from it.

        Raises:
            PluginUnavailable: a plugin whose devices it holds did not answer.
        """
        ...


class Undone(CancelledError):
    """A create was cancelled, and the runtime proved that nothing of it is left."""


class CreateProgress(Protocol):
    """Is told the steps of a create, and the progress of its pull."""

    def __call__(self, state: KernelState, pull: Pull | None = None) -> None: ...


class LogStream(StrEnum):
    """One of a kernel's two output streams."""

    STDOUT = "stdout"
    STDERR = "stderr"


class LogQuery(msgspec.Struct, frozen=True):
    """A log request: the last `tail` lines of those since a time (ns since the epoch)."""

    follow: bool = False
    tail: int | None = None
    since_ns: int = 0
    timestamps: bool = False
    streams: frozenset[LogStream] = frozenset(LogStream)


class Support(NamedTuple):
    """What a runtime can do for one request on this node.

    `not_enforced` names slots, and members of the request, that it cannot hold a kernel to.
    """

    features: Features
    not_enforced: frozenset[str] = frozenset()


class Session(Protocol):
    """A command that runs inside a kernel."""

    def output(self) -> AsyncGenerator[tuple[int, bytes]]:
        """Yield what it prints, with its stream, until it has ended and all of it is told."""
        ...

    async def write(self, data: bytes) -> None:
        """Give it input; returns when there is room for more."""
        ...

    async def close_input(self) -> None:
        """Let its input end."""
        ...

    async def resize(self, columns: int, rows: int) -> None:
        """Tell its terminal, if it has one, how large it is."""
        ...

    async def send_signal(self, number: int) -> None: ...

    async def ended(self) -> int:
        """Wait for its end, and return its exit code; of a signal, 128 and its number."""
        ...

    async def close(self) -> None:
        """End it if it runs, and let go of everything."""
        ...


class Runtime(Protocol):
    """What runs kernels. The contract suite in tests/contracts holds every one to this."""

    name: str
    minimum_memory_bytes: int

    async def close(self) -> None: ...

    def renew(self, rules: Any) -> None:
        """Take other settings for kernels that are created from now on."""
        ...

    async def problems(self, spec: KernelSpec) -> Sequence[Problem]:
        """Return what of a request this runtime cannot do; nothing is decided yet.

        Raises:
            RuntimeUnavailable: what it names on the node does not answer.
        """
        ...

    async def support(self, spec: KernelSpec) -> Support:
        """Return the ways to devices that this runtime takes, and what it cannot enforce.

        Raises:
            RuntimeUnavailable: that cannot be told now.
        """
        ...

    async def create(self, plan: KernelPlan, progress: CreateProgress) -> ObservedKernel:
        """Create and start a kernel.

        An AgentdError other than OutcomeUnknown, and Undone, prove that nothing is left. Any
        other exception, a bare cancellation included, proves nothing once `creating` was
        reported. That comes before the runtime is asked; `pulling`, while it has nothing to undo.

        Raises:
            ImageNotFound, CommandNotFound: the request named what does not exist.
            RuntimeFailure: the runtime refused.
            RuntimeUnavailable: it could not be asked.
            OutcomeUnknown: it was asked, and the answer was lost.
            Undone: the create was cancelled.
        """
        ...

    async def stop(self, ref: KernelRef, timeout_s: float | None) -> None:
        """Ask the kernel to end, kill it after `timeout_s` (None: the configured time).

        Returns when it has ended; a kernel that is not there has.
        """
        ...

    async def remove(self, ref: KernelRef, *, unless_alive: bool = False) -> bool:
        """Remove what is left of a kernel, running or not; one that is not there is removed.

        With `unless_alive` one that runs after all is left as it is: False.
        """
        ...

    async def list(self) -> Listing:
        """Return every kernel of this node, ended ones too, and what is left of others.

        Raises:
            RuntimeUnavailable: a complete list is not available.
        """
        ...

    async def find(self, ref: KernelRef) -> ObservedKernel | None:
        """Return one kernel, under whatever name it goes now if its handle is given.

        None only if it is proved not to be there.

        Raises:
            RuntimeUnavailable: that cannot be told now.
        """
        ...

    def follow(self) -> AsyncIterator[str]:
        """Yield the id of each kernel that something happened to; "" where all is to be listed.

        That is so once connected, and after what is ignored changed.

        Raises:
            RuntimeUnavailable: the connection could not be made, or broke.
        """
        ...

    async def run_inside(self, kernel: Kernel, spec: ExecSpec) -> Session:
        """Run a command inside a kernel that runs, with what the kernel has and no more.

        Raises:
            CommandNotFound, InvalidRequest: it cannot be run as was asked.
            KernelConflict: the kernel does not run.
            RuntimeFailure, RuntimeUnavailable: the runtime refused, or could not be asked.
        """
        ...

    async def usages(self, kernels: Sequence[Kernel]) -> Mapping[str, UsageReading]:
        """Return what kernels use, by id; of ended ones what is still known.

        One of which nothing is known may be missing.

        Raises:
            RuntimeUnavailable: that cannot be told now.
        """
        ...

    def logs(self, ref: KernelRef, query: LogQuery) -> AsyncGenerator[bytes]:
        """Yield what the kernel printed, byte for byte; closing it lets go of everything.

        Raises:
            InvalidRequest: this runtime does not keep what the query asks for.
        """
        ...


class Phase(StrEnum):
    """How far a kernel had come when it was last written down."""

    INTENT = "intent"
    HELD = "held"
    ENDED = "ended"


class SavedRecord(NamedTuple):
    """A kernel's record in the state folder; `text` as on the kernel, empty if unreadable."""

    kernel_id: str
    phase: Phase
    text: str


class StateStore(Protocol):
    """What the node remembers over restarts, beside what its runtimes have."""

    def load_devices(self) -> Sequence[Device]:
        """Return the devices of the last inventory, with what operators said of them."""
        ...

    def load_dealings(self) -> Mapping[str, Dealing]:
        """Return how plugins dealt their devices, by device name."""
        ...

    def save_devices(self, devices: Sequence[Device], dealings: Mapping[str, Dealing]) -> None:
        """Remember an inventory and its dealings.

        Raises:
            StateUnavailable: the last ones are still remembered.
        """
        ...

    def save_runtimes(self, names: Sequence[str]) -> None:
        """Remember which runtimes may have kernels of this node."""
        ...

    def load_records(self) -> Sequence[SavedRecord]:
        """Return the record of every kernel that was not removed."""
        ...

    def save_intent(self, kernel_id: str, text: str) -> None:
        """Remember a create before it is asked for; StateUnavailable if that cannot be."""
        ...

    def save_phase(self, kernel_id: str, phase: Phase, text: Callable[[], str]) -> None:
        """Remember how far a kernel has come; `text` is asked for where none is there yet.

        Where that cannot be, `retry` tries again.
        """
        ...

    def save_record(self, kernel_id: str, text: str) -> None:
        """Replace the record of a kernel; where that cannot be, `retry` tries again."""
        ...

    def drop_record(self, kernel_id: str) -> None:
        """Forget a kernel; where that cannot be, `retry` tries again."""
        ...

    def retry(self) -> None: ...

    def warnings(self) -> Sequence[str]:
        """Return what an operator should know of this memory."""
        ...


class ServedDevice(msgspec.Struct, frozen=True):
    """An accelerator that a daemon serves: its id, and every name of the physical thing."""

    name: str
    keys: tuple[str, ...]
    held: bool


class Served(msgspec.Struct, frozen=True):
    """What a daemon serves; of cores and memory (bytes) only what is the machine's own."""

    devices: tuple[ServedDevice, ...]
    cores: tuple[str, ...] = ()
    memory: int = 0


class Peer(msgspec.Struct, frozen=True):
    """Another daemon of this machine, and what it published last."""

    node_id: str
    user: str
    pid: int
    is_alive: bool
    served: Served


class Peers(Protocol):
    """The other daemons of this machine, which are not to serve what this one does."""

    def deciding(self, patience_s: float) -> AbstractContextManager[bool]:
        """Keep others from deciding meanwhile; False if that was not to be had in time."""
        ...

    def own(self) -> Served | None:
        """Return what this node published last, before its daemon started."""
        ...

    def others(self) -> Sequence[Peer]: ...

    def publish(self, served: Served) -> None:
        """Tell the others what this node serves from now on."""
        ...

    def warnings(self) -> Sequence[str]: ...


class Clock(NamedTuple):
    """`wall`: seconds since the epoch. `steady`: a monotonic clock, in seconds."""

    wall: Callable[[], float]
    steady: Callable[[], float]
