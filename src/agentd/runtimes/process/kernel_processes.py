"""The processes of a kernel: the only place that decides whether a process belongs to one.

A kernel lives if, and only if, one of three facts proves it. No unprivileged user, other kernel, or
the kernel itself can forge one:

lock     byte 1 of its bundle's lock is held. The bundle is agentd's alone, the lock was taken
         before the shim was started, and only the shim inherits it
cgroup   its cgroup, by the full path below agentd's own, has members
leader   the process that the shim recorded in the bundle lives: the same pid, the same start
         time, the same boot; or one of the descendants does that the shim noted there, in case
         it is killed

A process's own claims (environment, name, arguments, parents) prove nothing. See
docs/explanation/trust.md. While the bundle cannot be used, or after it was removed, the identity
of a shim that held the lock before still counts: the kernel lives as long as that shim or leader.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, repeat
from pathlib import Path

import msgspec
from msgspec.structs import replace

from agentd.core.kernel.states import NODE_RESTARTED, Ending, ObservedState
from agentd.host.cgroups.hierarchies import Cgroup
from agentd.host.processes import (
    Proc,
    all_processes,
    find_descendants,
    kill_matching,
    process_started_at,
    read_children,
    read_stat,
)
from agentd.runtimes.host.private_folder import Unreadable
from agentd.runtimes.process.bundle import IDENTITY, LOCK, Bundle, ShimIdentity
from agentd.runtimes.process.shim import COMMAND_BYTE, MAX_NOTE_PAUSE_S, SHIM_BYTE

_PASS_PAUSES_S = (0.0, 0.02, 0.05, 0.1)
"""Seconds between two passes, after the processes of the first have ended."""
_SHIM_ENDS_WITHIN_S = 0.02
_MAX_KILL_PASSES = 200
INIT = 1
"""The parent of all: never a shim, whatever it has open."""
_MAX_PASSES_ALONE = 20
"""Passes in a row that may find a shim without a kernel: about two seconds."""


class LifeProof(msgspec.Struct, frozen=True):
    """The proof that a kernel lived: the identity of its shim, and what was noted then."""

    identity: ShimIdentity
    noted: tuple[Proc, ...] = ()


class KernelProcesses:
    """The evidence about one kernel; `boot_id` is the current boot.

    `last` is the last proof that the kernel lived.
    """

    def __init__(
        self,
        bundle: Bundle,
        cgroup: Cgroup | None,
        boot_id: str,
        last: LifeProof | None = None,
    ) -> None:
        self._bundle = bundle
        self._cgroup = cgroup
        self._boot_id = boot_id
        self._known = last.identity if last else None
        self._known_noted = last.noted if last else ()
        self._passes_alone = 0

    @cached_property
    def identity(self) -> ShimIdentity | None:
        """The shim's record, of any boot."""
        return self._bundle.read_identity() or self._known

    @property
    def is_running(self) -> bool:
        """Whether anything proves that the kernel lives at this moment.

        Raises:
            Unreadable: that is unknown, because its bundle cannot be used.
            OSError: a temporary failure.
        """
        if (
            self.has_cgroup_members
            or self._leader is not None
            or self._noted()
            or self._is_locked(COMMAND_BYTE)
        ):
            return True
        if self.identity is None and not self._is_in_cgroup and not self._bundle.read_ending():
            self._bundle.read_strict(IDENTITY)  # if it is there, its command may live
        try:
            self._read_noted()
        except Unreadable:  # one of them may live
            if not self._bundle.read_ending():
                raise
        return False

    @property
    def _is_in_cgroup(self) -> bool:
        return self._cgroup is not None and self._cgroup.exists()

    def _is_locked(self, byte: int) -> bool:
        try:
            if self._bundle.is_locked(byte):
                return True
        except Unreadable:
            if self._known is None and not self._is_in_cgroup:
                raise
        return self._known is not None and self._known.shim.is_alive()

    def life_proof(self) -> LifeProof | None:
        """Return the proof that a running kernel lives, None if no shim ever held its lock."""
        identity = self.identity
        if identity is None or (identity != self._known and identity.shim != self._shim):
            return None
        return LifeProof(identity, tuple(self._noted()))

    @property
    def has_cgroup_members(self) -> bool:
        """Whether the kernel's cgroup, which bears this node's name, has members."""
        return bool(self._cgroup_members())

    def _cgroup_members(self) -> set[int]:
        return self._cgroup.members() if self._cgroup else set()

    @property
    def _leader(self) -> Proc | None:
        """The command's process, if it is proved to live.

        The record may be damaged, so the process must also be in the kernel's cgroup or under its
        shim, or where neither exists the leader of a session, as each command is.
        """
        identity = self.identity
        if identity is None or identity.boot_id != self._boot_id or not identity.leader.is_alive():
            return None
        shim, in_cgroup = self._shim, self._cgroup_members()
        stat = read_stat(identity.leader.pid)
        if stat is None or stat.pid == INIT:
            return None
        if shim is None and not (identity.has_cgroup and self._is_in_cgroup):
            return identity.leader if stat.session == stat.pid else None
        is_child = shim is not None and stat.parent == shim.pid
        return identity.leader if is_child or stat.pid in in_cgroup else None

    @property
    def _shim(self) -> Proc | None:
        """The shim's process, if it is proved to live: it has the held lock file open."""
        try:
            if not self._is_locked(SHIM_BYTE):
                return None
        except Unreadable:  # `is_running` raises it, unless something else proves life
            return None
        lock, identity = self._bundle.path / LOCK, self.identity
        is_recorded = identity is not None and identity.shim.is_alive()
        if (
            identity is not None
            and is_recorded
            and (identity == self._known or _has_open(identity.shim.pid, lock))
        ):
            return identity.shim
        holders = (
            stat for stat in all_processes() if stat.pid != INIT and _has_open(stat.pid, lock)
        )
        oldest = min(holders, key=lambda stat: stat.start_time, default=None)
        return Proc(oldest.pid, oldest.start_time) if oldest else None

    def _noted(self) -> list[Proc]:
        """Return the noted descendants that live, none if the note cannot be read."""
        with suppress(Unreadable):
            return self._read_noted()
        return []

    def _read_noted(self) -> list[Proc]:
        """Return the noted descendants that live; each is younger than the command.

        Those that were noted when the kernel was last proved to live count without the bundle, too.
        """
        identity, noted = self.identity, set(self._known_noted)
        if identity is None or identity.boot_id != self._boot_id or identity.has_cgroup:
            return []
        try:
            noted.update(self._bundle.read_descendants())
        except Unreadable:
            if self._known is None or self._bundle.is_readable():
                raise
        return [o for o in noted if o.start_time >= identity.start_time and o.is_alive()]

    def handle(self) -> str:
        """Return the pid of the command as recorded, unless another process has it now."""
        recorded_pid = self.identity.leader.pid if self.identity is not None else None
        if recorded_pid is not None and (self._leader or read_stat(recorded_pid) is None):
            return str(recorded_pid)
        members = self.members()
        if recorded_pid is not None and (
            not members or recorded_pid in {process.pid for process in members}
        ):
            return str(recorded_pid)
        return str(min(members, key=lambda process: process.start_time).pid) if members else ""

    def started_at(self) -> float | None:
        """Return the start time as recorded, or that of the kernel's first process."""
        if self.identity is not None:
            return self.identity.started_at
        handle = self.handle()
        return process_started_at(int(handle)) if handle else None

    def state(self) -> tuple[ObservedState, Ending]:
        """Return the state of the kernel, and its ending if it has ended."""
        if self.is_running:
            return ObservedState.RUNNING, Ending()
        if (ending := self._bundle.read_ending()) is not None:
            identity = self.identity
            if ending.reason and identity is not None and identity.boot_id != self._boot_id:
                ending = replace(ending, reason=NODE_RESTARTED)
            return ObservedState.EXITED, ending
        if self._bundle.read(IDENTITY) is None:
            return ObservedState.CREATED, Ending()
        if self.identity is None:
            reason = "its identity is unreadable and it has ended"
        elif self.identity.boot_id != self._boot_id:
            reason = f"{NODE_RESTARTED}; its exit status is lost"
        else:
            reason = "its shim was killed; its exit status is lost"
        return ObservedState.EXITED, Ending(reason=reason)

    def members(self) -> list[Proc]:
        """Return the live processes of the kernel.

        These are the members of its cgroup, the descendants of its shim (a subreaper, so nothing
        that the command started can leave it), and the session of its command while the command
        lives. Without a shim, these are the command, the noted ones and all their descendants.
        """
        processes = list(all_processes())
        shim, leader = self._shim, self._leader
        roots = [*([leader] if leader else []), *self._noted()]
        pids = {process.pid for process in roots} if shim is None else set[int]()
        pids |= find_descendants([shim.pid] if shim else pids, processes) | self._cgroup_members()
        return [
            Proc(stat.pid, stat.start_time)
            for stat in processes
            if stat.pid in pids or (leader is not None and stat.session == leader.pid)
        ]

    async def wait_ended(self) -> None:
        """Wait until nothing proves that the kernel lives."""
        async for _ in self.poll_members():
            pass

    async def poll_members(self) -> AsyncIterator[Sequence[Proc]]:
        """Yield the live processes whenever the previous ones have ended, until none is left.

        A kernel that forks and exits without pause has new processes on every pass, or seems to
        have none. The passes come at growing intervals, to leave time for the rest of the daemon.
        """
        for pause_s in chain(_PASS_PAUSES_S, repeat(_PASS_PAUSES_S[-1])):
            alive = await asyncio.to_thread(self.members)
            if not alive and not self.is_running:
                return
            yield alive
            with suppress(TimeoutError):
                async with asyncio.timeout(self._note_descendants(alive)):
                    for process in alive:
                        await process.wait()
            if (shim := self._shim) is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s + _SHIM_ENDS_WITHIN_S):
                        await shim.wait()
            else:
                await asyncio.sleep(pause_s)

    def _note_descendants(self, alive: Sequence[Proc]) -> float | None:
        """Note the processes of a kernel without a cgroup and a shim; return the next time."""
        if self._is_in_cgroup or self._shim is not None or not alive:
            return None
        with suppress(Unreadable):  # what it names may live
            if alive != self._bundle.read_descendants():
                self._bundle.write_descendants(alive)
        return MAX_NOTE_PAUSE_S

    def terminate(self) -> None:
        """Signal the command's process group; if it has ended, the remaining processes."""
        leader = self._leader
        if leader is not None:
            with suppress(ProcessLookupError):
                os.killpg(leader.pid, signal.SIGTERM)
            return
        for process in self.members():
            process.signal(signal.SIGTERM)

    def signal(self, number: int) -> bool:
        """Signal the command; False if it has ended."""
        if leader := self._leader:
            leader.signal(number)
        return leader is not None

    async def kill(self, alive: Collection[Proc]) -> None:
        """Kill these processes and those that they start meanwhile.

        A shim that stays without a kernel for too long (stopped, or waiting for a disk) is killed,
        too.
        """
        self._passes_alone = 0 if alive else self._passes_alone + 1
        if self._passes_alone > _MAX_PASSES_ALONE and (shim := self._shim) is not None:
            shim.signal(signal.SIGKILL)
        if self._cgroup is not None:
            self._cgroup.kill()
        for process in alive:
            process.signal(signal.SIGKILL)
            await asyncio.sleep(0)
        killed: set[int] = set()
        for _ in range(_MAX_KILL_PASSES):
            if not kill_matching(self._quick_members, killed):
                return
            await asyncio.sleep(0)

    def _quick_members(self) -> set[int]:
        """Return the processes that are known without scanning the whole host."""
        shim = self._shim
        return self._cgroup_members() | (read_children(shim.pid) if shim else set())


def _has_open(pid: int, file: Path) -> bool:
    """Return whether another process has a file open; False if it cannot be inspected."""
    if pid == os.getpid():
        return False
    with suppress(OSError):
        status = file.stat(follow_symlinks=False)
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.path.samestat(entry.stat(), status):
                    return True
    return False
