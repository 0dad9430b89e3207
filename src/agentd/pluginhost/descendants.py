"""Programs that a plugin's process started, which must end with it.

A library may start helpers, also in sessions of their own, which no signal to the process reaches.
They inherit a mark in the environment: the daemon's pid and start time, its pid namespace, and a
word unique to the plugin process. Helpers of a daemon that was killed are ended by the next one in
the same namespace.

Any user can put a mark into an environment, so it counts only on a process that runs entirely as
this user: a setuid program that another user started does not.
"""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import structlog

from agentd.concurrency import Walk, call_in_time
from agentd.errors import RuntimeUnavailable
from agentd.host.lookups import Lookups
from agentd.host.processes import Proc, all_processes, read_env, read_stat
from agentd.procfs import read_uids

log = structlog.get_logger()

MARK = "AGENTD_PLUGIN"
_ROUNDS = 5
"""Maximum passes; a helper may start another one between the scan and the kill."""
_reading = threading.Lock()


def new_mark() -> str:
    """Return a mark for one process of this daemon."""
    stat = read_stat(os.getpid())
    return f"{os.getpid()}.{stat.start_time if stat else 0}.{_pid_namespace()}.{uuid.uuid4().hex}"


async def kill_marked(mark: str) -> None:
    """Kill every process that carries this mark."""
    await _kill_in_time(lambda candidate: candidate == mark)


async def kill_orphans() -> None:
    """Kill processes left behind by plugins of earlier daemons."""
    await _kill_in_time(_is_orphaned)


async def _kill_in_time(matches: Callable[[str], bool]) -> None:
    """Kill the matching processes; the environment of one that is stuck may never be readable."""
    with suppress(RuntimeUnavailable, BlockingIOError):
        lookups = Lookups(max_threads=1)  # for this end alone: none waits for that of another
        await lookups.call("helpers of plugins", partial(_kill_matching, matches))


def _kill_matching(matches: Callable[[str], bool]) -> None:
    for _ in range(_ROUNDS):
        own = (s for s in all_processes() if read_uids(s.pid) == {os.geteuid()})
        marks = _read_marks(Proc(stat.pid, stat.start_time) for stat in own)
        processes = [process for process, mark in marks.items() if matches(mark)]
        for process in processes:
            log.warning("plugin.helper_ended", pid=process.pid)
            process.signal(signal.SIGKILL)
        if not processes:
            return


def _read_marks(processes: Iterable[Proc]) -> Mapping[Proc, str]:
    """Return the mark of each process with one, without those that are stuck.

    Raises:
        BlockingIOError: the host has no process id for a thread.
    """
    walk, marks = Walk(), dict[Proc, str]()
    with _reading:  # one waits for a stuck process, and the others find it silent
        for process in processes:
            with suppress(TimeoutError):
                subject = f"the environment of process {process.pid}"
                environ = call_in_time(subject, partial(read_env, process.pid), walk)
                marks |= {process: environ[MARK]} if MARK in environ else {}
    return marks


def _pid_namespace() -> str:
    """Return the number of this process's pid namespace (pid_namespaces(7))."""
    return Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")


def _is_orphaned(mark: str) -> bool:
    """Return whether a mark belongs to this pid namespace, and its daemon has ended."""
    match mark.split("."):
        case [pid, start_time, namespace, _] if pid.isdecimal() and start_time.isdecimal():
            is_alive = Proc(int(pid), int(start_time)).is_alive()
            return namespace == _pid_namespace() and not is_alive
    return False
