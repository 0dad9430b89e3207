"""Signals that reach whom they are meant for, and nobody else."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from agentd.host.processes import Proc, kill_matching, read_children, read_stat
from agentd.procfs import read_uids
from support.host_faults import HOSTILE_NAMES, named_process


@pytest.fixture
def started() -> Iterator[Callable[[int], list[subprocess.Popen[bytes]]]]:
    made: list[subprocess.Popen[bytes]] = []

    def start(count: int) -> list[subprocess.Popen[bytes]]:
        made.extend(subprocess.Popen(["sleep", "1000"]) for _ in range(count))
        return made[-count:]

    yield start
    for process in made:
        process.kill()
        process.wait()


def test_strike_kills_only_processes_named_twice(started) -> None:
    meant, moved = started(2)
    looks = iter([{meant.pid, moved.pid}, {meant.pid}])
    assert kill_matching(lambda: next(looks), set())
    assert meant.wait() == -signal.SIGKILL
    assert moved.poll() is None


def test_dying_processes_do_not_block_a_strike(started) -> None:
    processes = started(100)
    named = {process.pid for process in processes}
    struck: set[int] = set()
    while kill_matching(lambda: named, struck):  # nobody waits for them: they stay, as zombies
        pass
    assert struck == named
    assert {process.wait() for process in processes} == {-signal.SIGKILL}


def test_children_are_told_as_long_as_they_are_not_waited_for(started) -> None:
    (process,) = started(1)
    assert process.pid in read_children(os.getpid())
    process.kill()
    process.wait()
    assert process.pid not in read_children(os.getpid())
    assert read_children(process.pid) == set()


async def test_dead_leader_of_a_live_session_is_absent() -> None:
    """Its pid is not free as long as the session lives; pidfd_open(2) has another error then."""
    script = "sleep 1000 >/dev/null & echo $!; read go"
    pipe = subprocess.PIPE
    shell = subprocess.Popen(["sh", "-c", script], stdin=pipe, stdout=pipe, start_new_session=True)
    stat = read_stat(shell.pid)
    assert stat is not None
    assert shell.stdout is not None
    left = int(shell.stdout.readline())
    try:
        shell.communicate(b"go\n")
        leader = Proc(shell.pid, stat.start_time)
        leader.signal(signal.SIGKILL)
        async with asyncio.timeout(5):
            await leader.wait()
        assert not leader.is_alive()
    finally:
        os.kill(left, signal.SIGKILL)


async def test_a_successor_of_the_same_pid_is_not_signalled(started) -> None:
    (process,) = started(1)
    stat = read_stat(process.pid)
    assert stat is not None
    Proc(stat.pid, stat.start_time - 1).signal(signal.SIGKILL)
    assert process.poll() is None
    Proc(stat.pid, stat.start_time).signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_process_of_any_name_is_read(name: bytes) -> None:
    with named_process(name) as process:
        stat = read_stat(process.pid)
        assert stat is not None
        assert stat.parent == os.getpid()
        assert read_uids(process.pid) == {os.geteuid()}
