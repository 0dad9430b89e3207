"""Processes by identity: pid and start time together, never a bare pid.

A pid is reused after its process has ended; the pair of pid and start time is not (proc(5), field
22 of stat). Signals go through a pidfd (pidfd_open(2)) that was opened before the start time was
compared, so they cannot reach a successor.

Only ESRCH and ENOENT mean that a process does not exist. Any other failure (no file descriptor, no
memory) is raised: it proves nothing.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from agentd.os_errors import ending_process_as_gone
from agentd.procfs import read_lines

POLL_S = 1.0
"""Seconds between polls of a process while no file descriptor is available."""
NO_PROCESS_ERRORS = (FileNotFoundError, ProcessLookupError)
_MAX_AT_ONCE = 16
"""Maximum processes that one pass kills, each by a file descriptor of its own."""


class Stat(msgspec.Struct, frozen=True):
    """Fields of /proc/PID/stat; `start_time` in ticks since boot."""

    pid: int
    state: str
    parent: int
    session: int
    start_time: int


class Proc(msgspec.Struct, frozen=True):
    """One process, unique until the next boot."""

    pid: int
    start_time: int

    def is_alive(self) -> bool:
        """Return whether it runs; a zombie does not."""
        stat = read_stat(self.pid)
        return stat is not None and stat.start_time == self.start_time and stat.state not in "ZX"

    def signal(self, number: int) -> None:
        """Send a signal to exactly this process, if it exists.

        Raises:
            OSError: it is unknown whether the process exists.
        """
        with suppress(ProcessLookupError), open_pidfd(self.pid) as descriptor:
            if self.is_alive():
                signal.pidfd_send_signal(descriptor, number)

    async def wait(self) -> None:
        """Wait until it has ended, polling only if no descriptor is available."""
        while True:
            try:
                return await self._wait_readable()
            except OSError:
                await asyncio.sleep(POLL_S)

    async def _wait_readable(self) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        with suppress(ProcessLookupError), open_pidfd(self.pid) as descriptor:
            try:
                if self.is_alive():
                    loop.add_reader(descriptor, _resolve, done)
                    await done
            finally:
                loop.remove_reader(descriptor)


@contextmanager
def open_pidfd(pid: int) -> Iterator[int]:
    """Open a pidfd.

    Raises:
        ProcessLookupError: the process does not exist.
        OSError: it is unknown whether the process exists.
    """
    try:
        with ending_process_as_gone():
            descriptor = os.pidfd_open(pid)
    except FileNotFoundError as error:  # since Linux 6.9, of the id of a thread
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def kill_matching(find_pids: Callable[[], set[int]], killed: set[int]) -> bool:
    """Kill the processes that `find_pids` returns, except `killed` ones; False if there are none.

    A process is killed only if `find_pids` returns it before and after its descriptor was opened,
    so no signal reaches a successor. A quick `find_pids` can catch processes that fork and exit
    without pause, which a scan of all processes never does.

    Raises:
        OSError: it is unknown whether a process exists.
    """
    pids = sorted(find_pids() - killed)[:_MAX_AT_ONCE]
    if not pids:
        return False
    with ExitStack() as stack:
        descriptors: dict[int, int] = {}
        for pid in pids:
            with suppress(ProcessLookupError):
                descriptors[pid] = stack.enter_context(open_pidfd(pid))
        for pid in descriptors.keys() & find_pids():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptors[pid], signal.SIGKILL)
            killed.add(pid)
    return True


def read_children(pid: int) -> set[int]:
    """Return the children of a single-threaded process, as far as they are known (proc(5))."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_bytes()
    except NO_PROCESS_ERRORS:
        return set()
    return {int(child) for child in text.split()}


def _resolve(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def read_stat(pid: int) -> Stat | None:
    """Return the stat of a process, None if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except NO_PROCESS_ERRORS:
        return None
    fields = text.rpartition(b")")[2].split()
    return Stat(pid, chr(fields[0][0]), int(fields[1]), int(fields[3]), int(fields[19]))


def process_started_at(pid: int) -> float | None:
    """Return the start time of a process in epoch seconds, None if it does not exist.

    It is the start time in ticks since boot, added to the boot time (proc(5), stat).
    """
    stat = read_stat(pid)
    if stat is None:
        return None
    lines = read_lines("/proc/stat")
    boot_time = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
    return boot_time + stat.start_time / os.sysconf("SC_CLK_TCK")


def read_env(pid: int) -> dict[str, str]:
    """Return the initial environment of a process, empty if it may not be read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except (*NO_PROCESS_ERRORS, PermissionError):
        return {}
    pairs = (item.decode(errors="replace").partition("=") for item in text.split(b"\0") if item)
    return {name: value for name, _, value in pairs}


def all_processes() -> Iterator[Stat]:
    """Yield every process of the host that has not ended."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - a scan of all processes, three times as fast
        if name.isdigit() and (stat := read_stat(int(name))) and stat.state not in "ZX":
            yield stat


def find_descendants(roots: Iterable[int], processes: Iterable[Stat]) -> set[int]:
    """Return the direct and indirect descendants of processes, including adopted ones."""
    children_of: dict[int, list[int]] = {}
    for stat in processes:
        children_of.setdefault(stat.parent, []).append(stat.pid)
    pids: set[int] = set()
    pending = list(roots)
    while pending:
        for pid in children_of.get(pending.pop(), ()):
            pids.add(pid)
            pending.append(pid)
    return pids
