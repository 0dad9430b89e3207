"""Kernels: what was asked for, what runs, and the moves between states.

    preparing --> pulling --> creating --> running --> stopping --> terminated
        |            |           |        ^  |  ^         |             |
        |            |           |        |  v  |         |             | (started again
        +------------+-----------+        | paused        |             |   by hand)
                     |                    +---------------|-------------+
                     v                                    v
                  failed                                lost

`unreadable` stands beside `running`: the kernel lives, and its record cannot be read.
`lost` is reached from every live state, once absence is proved. `TRANSITIONS` is the
rule; an illegal move is refused before anything changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from agentd.core.container_edits import Mount
from agentd.core.container_options import ContainerOptions
from agentd.core.ledger import Allocation


class KernelState(StrEnum):
    """Where a kernel is in its life."""

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


S = KernelState

STARTING = frozenset({S.PREPARING, S.PULLING, S.CREATING})
LIVE = frozenset({S.RUNNING, S.PAUSED, S.STOPPING, S.UNREADABLE})
PRESENT = LIVE | {S.TERMINATED}
"""States in which the runtime has something of the kernel."""

ENDED = frozenset({S.TERMINATED, S.FAILED, S.LOST})

TRANSITIONS: Mapping[KernelState, frozenset[KernelState]] = {
    S.PREPARING: frozenset({S.PULLING, S.CREATING, S.FAILED, S.LOST}),
    S.PULLING: frozenset({S.CREATING, S.FAILED, S.LOST}),
    S.CREATING: frozenset({S.PULLING, S.RUNNING, S.TERMINATED, S.FAILED, S.LOST}),
    S.RUNNING: frozenset({S.PAUSED, S.STOPPING, S.TERMINATED, S.LOST}),
    S.PAUSED: frozenset({S.RUNNING, S.STOPPING, S.TERMINATED, S.LOST}),
    S.STOPPING: frozenset({S.RUNNING, S.PAUSED, S.TERMINATED, S.LOST, S.UNREADABLE}),
    S.TERMINATED: frozenset({S.RUNNING, S.PAUSED, S.LOST}),
    S.FAILED: frozenset(),
    S.LOST: frozenset({S.RUNNING, S.PAUSED, S.TERMINATED}),
    S.UNREADABLE: frozenset({S.STOPPING, S.TERMINATED, S.LOST}),
}


@dataclass(frozen=True, slots=True)
class Port:
    """A port of the kernel that the node forwards; `host` None leaves the choice to the node.

    `address` is where it is published, once it is.
    """

    container: int
    host: int | None = None
    protocol: str = "tcp"
    address: str = ""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A create request after it was read; `spec_hash` is equal for equal requests."""

    kernel_id: str
    agent_id: str
    command: tuple[str, ...]
    spec_hash: str
    image: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    slots: Mapping[str, object] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    ports: tuple[Port, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    working_dir: str | None = None
    user: str | None = None
    container: ContainerOptions = field(default_factory=ContainerOptions)


@dataclass(frozen=True, slots=True)
class Pull:
    """How far the download of an image is, in bytes; the total grows as layers are learnt of."""

    current: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Ending:
    """How a kernel's command ended; times are seconds since the epoch."""

    exit_code: int | None = None
    oom_killed: bool = False
    finished_at: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel as agentd knows it; times are seconds since the epoch.

    `slots` are plain decimals as they were granted, `handle` is what the runtime knows
    it by (a container id, a process id).
    """

    kernel_id: str
    agent_id: str
    state: KernelState
    spec_hash: str
    created_at: float
    runtime: str
    slots: Mapping[str, str] = field(default_factory=dict)
    allocation: Allocation = field(default_factory=Allocation)
    ports: tuple[Port, ...] = ()
    handle: str | None = None
    started_at: float | None = None
    ending: Ending = field(default_factory=Ending)
    not_enforced: tuple[str, ...] = ()
    reason: str = ""
    pull: Pull | None = None

    @property
    def holds(self) -> bool:
        """Whether its devices are charged to it."""
        return self.state not in ENDED

    def moved_to(self, state: KernelState, **changes: Any) -> Kernel:  # noqa: ANN401 - the fields of Kernel
        """Return the kernel in another state.

        Raises:
            ValueError: `TRANSITIONS` does not know the move.
        """
        if state is not self.state and state not in TRANSITIONS[self.state]:
            raise ValueError(f"kernel {self.kernel_id} cannot go from {self.state} to {state}")
        return replace(self, state=state, **changes)


def step_between(before: Kernel | None, now: Kernel | None) -> str | None:
    """Return the step in a kernel's life that lies between two looks at it, if there is one.

    `before-create`, `after-start`, `before-stop` or `after-stop`; an adopted kernel took its
    first steps earlier.
    """
    was, state = before.state if before else None, now.state if now else None
    if was is None and state is KernelState.PREPARING:
        return "before-create"
    if was in STARTING and state is KernelState.RUNNING:
        return "after-start"
    if was in LIVE and state is KernelState.STOPPING and was is not state:
        return "before-stop"
    if was in LIVE and (state is None or state in ENDED):
        return "after-stop"
    return None
