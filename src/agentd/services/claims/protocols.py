"""The Protocol that claims require of the host."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from agentd.core.claim.claim import CgroupHolder, ClaimOwner, ProcessHolder


class NoSuchHolder(Exception):
    """A process or cgroup that is not there, or not the caller's to name."""


class Holders(Protocol):
    """The processes and cgroups of the host that claims end with."""

    def process(
        self, pid: int, start_time: int | None, *, caller_pid: int, caller_uid: int | None
    ) -> ProcessHolder:
        """Return a process that a caller names; `caller_uid` None may name any.

        Without a start time it is the caller itself, or a child of it.

        Raises:
            NoSuchHolder: there is none, or it is not the caller's to name.
        """
        ...

    def cgroup(
        self, path: str, kernel_pids: Collection[int], containers: Collection[str]
    ) -> CgroupHolder:
        """Return a cgroup of version 2 that has processes, by its path in agentd's namespace.

        `kernel_pids` are first processes of kernels, `containers` ids of their containers.

        Raises:
            NoSuchHolder: there is none, it has no process, or it holds agentd or a kernel.
        """
        ...

    def lives(self, holder: ClaimOwner) -> bool:
        """Return whether a process or cgroup has not ended; others have no end.

        Raises:
            OSError: it cannot be observed now.
        """
        ...

    def watch(self, holder: ClaimOwner, ended: Callable[[], None]) -> Callable[[], None]:
        """Call `ended` once when a process or cgroup has ended, at once if it has; return a stop.

        Raises:
            OSError: it cannot be observed now.
        """
        ...
