"""Observations of kernels by runtimes, in common terms."""

from __future__ import annotations

import msgspec

from agentd.core.allocation.ports import Port
from agentd.core.kernel.states import Ending, KernelRef, ObservedState
from agentd.core.names import validate_name


class ObservedKernel(msgspec.Struct, frozen=True):
    """An observed kernel of this node; its ids are valid names, or construction fails.

    `cores`, `memory_bytes` and `ports` are the runtime's own limits, if known; they only matter if
    `record` cannot be read. One that `is_partial` was only listed, and its times and ending are
    unknown. `pid` and `unit` are as in `Kernel`. An empty `record` is missing, unless
    `record_problem` says otherwise; a record with a problem can be read. With `is_unreadable`, the
    runtime cannot read the kernel's state: it counts as running unless its end is proved.
    """

    kernel_id: str
    agent_id: str
    runtime: str
    handle: str
    state: ObservedState
    record: str
    device_label: str
    started_at: float | None = None
    ending: Ending = msgspec.field(default_factory=Ending)
    cores: tuple[str, ...] | None = None
    memory_bytes: int | None = None
    ports: tuple[Port, ...] = ()
    is_partial: bool = False
    pid: int | None = None
    unit: str | None = None
    record_problem: str = ""
    is_unreadable: bool = False

    def __post_init__(self) -> None:
        validate_name(self.kernel_id)
        if self.agent_id:
            validate_name(self.agent_id)

    @property
    def ref(self) -> KernelRef:
        """Its reference for the runtime."""
        return KernelRef(self.kernel_id, self.handle)

    @property
    def is_alive(self) -> bool:
        """Whether it runs, paused or not."""
        return self.state in (ObservedState.RUNNING, ObservedState.PAUSED)


class Leftover(msgspec.Struct, frozen=True):
    """The remains of a kernel that is not listed, such as a folder or a cgroup, in words."""

    kernel_id: str
    description: str


class Listing(msgspec.Struct, frozen=True):
    """The kernels and remains of a node at one runtime, including ended kernels.

    `ignored` describes objects that claim to be kernels of this node without a valid id.
    """

    kernels: tuple[ObservedKernel, ...]
    leftovers: tuple[Leftover, ...] = ()
    ignored: tuple[str, ...] = ()
