"""Processes by identity: pid and start time together, never a bare pid.

A pid is used again after its process is gone; the pair of pid and start time is not
(proc(5), field 22 of stat). Signals go through a pidfd (pidfd_open(2)) that was opened
before the start time was compared, so they cannot reach a successor.

Only ESRCH and ENOENT say that a process is not there. Any other failure to look (no file
descriptor, no memory) is raised: who cannot look knows nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from agentd.core.record import read_time

WITHOUT_DESCRIPTOR_S = 1.0
"""How often a process is looked at while there is no file descriptor to wait for it with."""
_NOT_THERE = (FileNotFoundError, ProcessLookupError)


class Stat(NamedTuple):
    """The fields of /proc/PID/stat that matter here; `start_time` in ticks since boot."""

    pid: int
    state: str
    parent: int
    session: int
    start_time: int


class Proc(NamedTuple):
    """One process, for as long as the machine is up."""

    pid: int
    start_time: int

    def is_alive(self) -> bool:
        """Tell whether it runs; a zombie does not."""
        now = read_stat(self.pid)
        return now is not None and now.start_time == self.start_time and now.state not in "ZX"

    def signal(self, number: int) -> None:
        """Send a signal to this process, or to none.

        Raises:
            OSError: it is not known whether it is there.
        """
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.pid)
            try:
                if self.is_alive():
                    signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)

    async def ended(self) -> None:
        """Wait until it has ended, without polling as long as there is a descriptor to be had."""
        while True:
            try:
                return await self._ended()
            except OSError:
                await asyncio.sleep(WITHOUT_DESCRIPTOR_S)

    async def _ended(self) -> None:
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        try:
            if self.is_alive():
                loop.add_reader(descriptor, _settled, done)
                await done
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a process kernel is: its command, its keeper, and the boot they belong to."""

    leader: Proc
    keeper: Proc
    boot_id: str
    started_at: float

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Identity:
        """Read what the keeper wrote; KeyError, TypeError or ValueError if it did not."""
        return cls(
            Proc(int(raw["pid"]), int(raw["start_time"])),
            Proc(int(raw["keeper_pid"]), int(raw["keeper_start_time"])),
            str(raw["boot_id"]),
            read_time(raw["started_at"]),
        )


def _settled(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def read_stat(pid: int) -> Stat | None:
    """Return what the kernel says of a process; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except _NOT_THERE:
        return None
    fields = text.rpartition(b")")[2].split()
    return Stat(pid, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def read_env(pid: int) -> dict[str, str]:
    """Return the environment a process was started with; empty if it may not be read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except (*_NOT_THERE, PermissionError):
        return {}
    pairs = (item.decode(errors="replace").partition("=") for item in text.split(b"\0") if item)
    return {name: value for name, _, value in pairs}


def members(identity: Identity, marks: Mapping[str, str]) -> list[Proc]:
    """Return the live processes of a kernel: its session, and whatever its keeper looks after.

    Where neither command nor keeper lives, a session of that number may be somebody
    else's: then a process counts only if its environment carries `marks`.
    """
    everyone = list(all_processes())
    is_certain = identity.leader.is_alive() or identity.keeper.is_alive()
    kept = _descendants(identity.keeper.pid, everyone) if identity.keeper.is_alive() else set()
    return [
        Proc(stat.pid, stat.start_time)
        for stat in everyone
        if stat.pid in kept
        or (
            stat.session == identity.leader.pid
            and (is_certain or marks.items() <= read_env(stat.pid).items())
        )
    ]


def recovered(marks: Mapping[str, str], boot_id: str) -> Identity | None:
    """Return the identity of a kernel from what its processes carry; None if none lives.

    For a kernel whose identity cannot be read. The leader is the oldest that leads a session;
    a keeper is known only as its parent.
    """
    mine = [s for s in all_processes() if marks.items() <= read_env(s.pid).items()]
    return _identity_of(mine, boot_id) if mine else None


def _identity_of(mine: Sequence[Stat], boot_id: str) -> Identity:
    leader = min(mine, key=lambda stat: (stat.session != stat.pid, stat.start_time))
    parent = read_stat(leader.parent) if leader.parent > 1 else None
    keeper = parent if parent and _is_keeper(parent.pid) else leader
    return Identity(
        Proc(leader.pid, leader.start_time), Proc(keeper.pid, keeper.start_time), boot_id, 0.0
    )


def marked(node_id: str) -> list[tuple[int, str]]:
    """Return the processes that carry a node's mark, each with its kernel."""
    found = ((stat.pid, read_env(stat.pid)) for stat in all_processes())
    return [
        (pid, env.get("AGENTD_KERNEL", ""))
        for pid, env in found
        if env.get("AGENTD_NODE") == node_id
    ]


def kept_kernels(node_id: str, known: Container[int]) -> set[str]:
    """Return the kernels of a node that keepers of ours look after, but for `known` leaders.

    What a process says of itself counts only if a keeper of this user is its parent: anybody
    can write into an environment of his own.
    """
    found = set()
    for stat in all_processes():
        if stat.session == stat.pid and stat.pid not in known:
            env = read_env(stat.pid)
            if env.get("AGENTD_NODE") == node_id and _is_keeper(stat.parent):
                found.add(env.get("AGENTD_KERNEL", ""))
    return found - {""}


def _is_keeper(pid: int) -> bool:
    folder = Path(f"/proc/{pid}")
    try:
        is_ours = folder.stat().st_uid == os.geteuid()
        return is_ours and b"shim.py" in (folder / "cmdline").read_bytes()
    except (*_NOT_THERE, PermissionError):
        return False


def all_processes() -> Iterator[Stat]:
    """Yield every process of the machine that has not ended."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - a scan of all processes, three times as fast
        if name.isdigit() and (stat := read_stat(int(name))) and stat.state not in "ZX":
            yield stat


def _descendants(root: int, everyone: Iterable[Stat]) -> set[int]:
    children: dict[int, list[int]] = {}
    for stat in everyone:
        children.setdefault(stat.parent, []).append(stat.pid)
    found: set[int] = set()
    pending = [root]
    while pending:
        for pid in children.get(pending.pop(), ()):
            found.add(pid)
            pending.append(pid)
    return found
