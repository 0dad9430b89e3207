"""Kernels: requests, states, and the transitions between states.

Two tables are the state machine, and every change of a kernel goes through one of them: `MOVES` is
for agentd's own actions (`Kernel.moved_to`), `OBSERVATIONS` for observed states
(`Kernel.with_observation`). An illegal change is refused before anything changes. The drawing in
docs/reference/states.md is generated from the two tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec
from msgspec.structs import replace

from agentd.core.access import Caller
from agentd.core.allocation.ledger import Allocation
from agentd.core.allocation.ports import Port
from agentd.core.kernel.edits import Mount
from agentd.core.names import NAME

KERNEL_ID = NAME
"""The pattern of kernel ids, which appear in names of containers, folders and cgroups."""


class KernelState(StrEnum):
    """The state of a kernel.

    `failed` is a create that never ran, `lost` was proved to be removed outside of agentd, and an
    `unreadable` one is alive, but its record cannot be read.
    """

    PREPARING = "preparing"
    PULLING = "pulling"
    CREATING = "creating"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    TERMINATED = "terminated"
    FAILED = "failed"
    LOST = "lost"
    UNREADABLE = "unreadable"


class ObservedState(StrEnum):
    """The state of a kernel according to its runtime.

    A `created` one never ran; an `unreadable` one is alive, but its record cannot be read.
    """

    CREATED = "created"
    RUNNING = "running"
    PAUSED = "paused"
    UNREADABLE = "unreadable"
    EXITED = "exited"
    ABSENT = "absent"


S = KernelState

STARTING = frozenset({S.PREPARING, S.PULLING, S.CREATING})
LIVE = frozenset({S.RUNNING, S.PAUSED, S.STOPPING, S.UNREADABLE})
PRESENT = LIVE | {S.TERMINATED}
"""States in which the runtime has a container, unit or process of the kernel."""

ENDED = frozenset({S.TERMINATED, S.FAILED, S.LOST})

MOVES: Mapping[KernelState, frozenset[KernelState]] = {
    S.PREPARING: frozenset({S.PULLING, S.CREATING, S.FAILED}),
    S.PULLING: frozenset({S.CREATING, S.FAILED}),
    S.CREATING: frozenset({S.PULLING, S.FAILED}),
    S.RUNNING: frozenset({S.STOPPING}),
    S.PAUSED: frozenset({S.STOPPING}),
    S.UNREADABLE: frozenset({S.STOPPING}),
    S.STOPPING: frozenset({S.RUNNING, S.PAUSED, S.UNREADABLE}),
    S.TERMINATED: frozenset(),
    S.FAILED: frozenset(),
    S.LOST: frozenset(),
}
"""Transitions of agentd's actions. A failed stop leaves the kernel as it was."""

_ALIVE = {
    ObservedState.RUNNING: S.RUNNING,
    ObservedState.PAUSED: S.PAUSED,
    ObservedState.UNREADABLE: S.UNREADABLE,
    ObservedState.EXITED: S.TERMINATED,
    ObservedState.ABSENT: S.LOST,
}
_STOPPING = dict.fromkeys(
    (ObservedState.RUNNING, ObservedState.PAUSED, ObservedState.UNREADABLE), S.STOPPING
)

OBSERVATIONS: Mapping[KernelState, Mapping[ObservedState, KernelState]] = {
    S.PREPARING: {},
    S.PULLING: {},
    S.CREATING: {**_ALIVE, ObservedState.ABSENT: S.FAILED},
    S.RUNNING: _ALIVE,
    S.PAUSED: _ALIVE,
    S.UNREADABLE: _ALIVE,
    S.STOPPING: {**_ALIVE, **_STOPPING},
    S.TERMINATED: _ALIVE,
    S.FAILED: {**_ALIVE, ObservedState.ABSENT: S.FAILED},
    S.LOST: _ALIVE,
}
"""Transitions of observations. Before `creating` the runtime has nothing to observe."""


class KernelSpec(msgspec.Struct, frozen=True):
    """A parsed create request; `spec_hash` is equal for equal requests.

    `slots` are amounts as `agentd.core.slots.parse_quantity` returns them. `devices` restricts the
    choice, by device name: ids, stable ids or aliases. `options` are further members that differ
    from their defaults, for the runtime alone.
    """

    kernel_id: str
    agent_id: str
    command: tuple[str, ...]
    spec_hash: str
    image: str | None = None
    env: Mapping[str, str] = {}
    slots: Mapping[str, object] = {}
    devices: Mapping[str, tuple[str, ...]] = {}
    mounts: tuple[Mount, ...] = ()
    ports: tuple[Port, ...] = ()
    labels: Mapping[str, str] = {}
    working_dir: str | None = None
    user: str | None = None
    options: Mapping[str, object] = {}
    created_by: str = ""
    is_discreet: bool = False
    """Whether the caller must not learn of other agents."""
    claim_id: str | None = msgspec.field(default=None, name="claim")
    """The claim whose devices it takes over, if it names one."""
    keeps_claim: bool | None = msgspec.field(default=None, name="keep_claim")
    """Whether the claim outlives the kernel."""
    overcommits: bool = msgspec.field(default=False, name="overcommit")
    """Whether it takes devices of an observed claim that are held above their capacity."""
    attempt: str = ""
    """The mark of the attempt to create it; repetitions of the request have the same."""
    removes: bool = msgspec.field(default=False, name="remove")
    """Whether the kernel is deleted once its creator has read its end."""
    caller: Caller | None = None


class Pull(msgspec.Struct, frozen=True):
    """The progress of a pull in bytes; the total grows as layers become known."""

    current: int = 0
    total: int = 0


NODE_RESTARTED = "the node restarted"
"""The reason of an end by a restart of the host."""


class Ending(msgspec.Struct, frozen=True):
    """The end of a kernel's command; times are seconds since the epoch."""

    exit_code: int | None = None
    oom_killed: bool = False
    finished_at: float | None = None
    reason: str = ""


class KernelRef(msgspec.Struct, frozen=True):
    """A kernel for its runtime: its id, and the handle that the runtime assigned."""

    kernel_id: str
    handle: str | None = None


class Kernel(msgspec.Struct, frozen=True):
    """One kernel as agentd knows it; times are seconds since the epoch.

    `slots` are plain decimals as they were granted; `handle` is the runtime's name for it (a
    container id, a process id); `created_by` is the caller's name; `degraded` lists limits that
    were changed outside of agentd. `pid` is that of its first process on the host, if its runtime
    starts processes; `unit` is the unit of the systemd runtime. `claim_id` is the claim
    that it took its devices from, which outlives it if it `keeps_claim`. `attempt` is the mark of
    the create. One that `removes` itself is deleted once its creator has read its end; that is
    the caller of the name `created_by` and, on a socket, with the uid `creator_uid`.
    """

    kernel_id: str
    agent_id: str
    state: KernelState
    spec_hash: str
    created_at: float
    runtime: str
    slots: Mapping[str, str] = {}
    allocation: Allocation = msgspec.field(default_factory=Allocation)
    ports: tuple[Port, ...] = ()
    handle: str | None = None
    started_at: float | None = None
    ending: Ending = msgspec.field(default_factory=Ending)
    not_enforced: tuple[str, ...] = ()
    degraded: tuple[str, ...] = ()
    reason: str = ""
    pull: Pull | None = None
    created_by: str = ""
    image: str | None = None
    command: tuple[str, ...] = ()
    env_names: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    labels: Mapping[str, str] = {}
    pid: int | None = None
    unit: str | None = None
    claim_id: str | None = None
    keeps_claim: bool = False
    attempt: str = ""
    removes: bool = False
    creator_uid: int | None = None

    @property
    def holds_devices(self) -> bool:
        """Whether its devices are charged to it."""
        return self.state not in ENDED

    @property
    def ref(self) -> KernelRef:
        """Its reference for the runtime."""
        return KernelRef(self.kernel_id, self.handle)

    def moved_to(self, state: KernelState, **changes: Any) -> Kernel:
        """Return the kernel after an action of agentd.

        Raises:
            ValueError: `MOVES` has no such transition.
        """
        if state is not self.state and state not in MOVES[self.state]:
            raise ValueError(f"kernel {self.kernel_id} cannot move from {self.state} to {state}")
        return replace(self, state=state, **changes)

    def with_observation(self, state: ObservedState, **changes: Any) -> Kernel:
        """Return the kernel after an observation.

        Raises:
            ValueError: `OBSERVATIONS` has no such transition.
        """
        if state not in OBSERVATIONS[self.state]:
            raise ValueError(f"kernel {self.kernel_id} is {self.state} and cannot be seen {state}")
        return replace(self, state=OBSERVATIONS[self.state][state], **changes)


def lifecycle_step(before: Kernel | None, now: Kernel | None) -> str | None:
    """Return the step in a kernel's life between two of its states, if there is one.

    `before-create`, `after-start`, `before-stop` or `after-stop`; an adopted kernel took its
    first steps earlier.
    """
    state_before, state = before.state if before else None, now.state if now else None
    if state_before is None and state is KernelState.PREPARING:
        return "before-create"
    if state_before in STARTING and state is KernelState.RUNNING:
        return "after-start"
    if state_before in LIVE and state is KernelState.STOPPING and state_before is not state:
        return "before-stop"
    if state_before in LIVE and (state is None or state in ENDED):
        return "after-stop"
    return None
