"""What a runtime finds of a kernel, in words that all runtimes share."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from agentd.core.allocation.ports import Port
from agentd.core.kernel.states import Ending, KernelRef
from agentd.core.names import checked


class ObservedState(StrEnum):
    """What a runtime says of a kernel; a `created` one never ran."""

    CREATED = "created"
    RUNNING = "running"
    PAUSED = "paused"
    EXITED = "exited"


class ObservedKernel(msgspec.Struct, frozen=True):
    """A kernel of this node as a runtime found it; its ids are names, or it cannot be made.

    `cores`, `memory_bytes` and `ports` are what the runtime holds it to, where it can tell;
    they matter only if `record` cannot be read. One that `is_partial` was only listed, and
    its times and ending are not known. `pid` and `unit` are as in `Kernel`. An empty `record` is
    missing, unless `record_problem` says otherwise.
    """

    kernel_id: str
    agent_id: str
    runtime: str
    handle: str
    state: ObservedState
    record: str
    statement: str
    started_at: float | None = None
    ending: Ending = msgspec.field(default_factory=Ending)
    cores: tuple[str, ...] | None = None
    memory_bytes: int | None = None
    ports: tuple[Port, ...] = ()
    is_partial: bool = False
    pid: int | None = None
    unit: str | None = None
    record_problem: str = ""

    def __post_init__(self) -> None:
        checked(self.kernel_id)
        if self.agent_id:
            checked(self.agent_id)

    @property
    def ref(self) -> KernelRef:
        """What its runtime knows it by."""
        return KernelRef(self.kernel_id, self.handle)

    @property
    def is_alive(self) -> bool:
        """Whether it runs, paused or not."""
        return self.state in (ObservedState.RUNNING, ObservedState.PAUSED)


class Leftover(msgspec.Struct, frozen=True):
    """What is left of a kernel that is not listed, such as a folder or a cgroup, in words."""

    kernel_id: str
    what: str


class Listing(msgspec.Struct, frozen=True):
    """Everything that a runtime has of a node: its kernels, ended ones too, and leftovers.

    `ignored` describes, in words, what claims to be a kernel of this node and has no valid id.
    """

    kernels: tuple[ObservedKernel, ...]
    leftovers: tuple[Leftover, ...] = ()
    ignored: tuple[str, ...] = ()
