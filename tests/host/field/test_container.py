"""agentd as process 1 of a container without an init."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentd.host.processes import read_children, read_stat
from support.daemon import Daemon
from support.waiting import until

pytestmark = pytest.mark.needs("root")
FIRST = "import os, sys; os.execvp('unshare', ['unshare', '--pid', '--fork', '--mount-proc',"
FIRST += " '--kill-child', sys.executable, '-m', 'agentd', *sys.argv[1:]])"


@pytest.fixture
async def container(folder: Path) -> AsyncIterator[Daemon]:
    """A daemon that is process 1 of a pid namespace, which ends with it."""
    made = Daemon(folder, "process")
    made.program = ("-c", FIRST)
    await made.start()
    yield made
    if made.process is not None:
        await made.stop(signal.SIGKILL)


def first_process(container: Daemon) -> int:
    assert container.process is not None
    (first,) = read_children(container.process.pid)
    return first


def zombies_of(parent: int) -> list[int]:
    stats = map(read_stat, read_children(parent))
    return [stat.pid for stat in stats if stat is not None and stat.state == "Z"]


async def test_kernels_leave_no_zombies_in_a_container(container: Daemon) -> None:
    for number in range(3):
        kernel_id = f"k{number}"
        await container.running(kernel_id=kernel_id, command=["sh", "-c", "sleep 1 & sleep 1"])
        await container.until(kernel_id, "terminated")
    first = first_process(container)
    await until(lambda: zombies_of(first), [], text="no zombie of process 1")
    os.kill(first, signal.SIGTERM)
    assert await container.ended() == 0
    assert "daemon.stopped" in container.log


async def test_refused_configuration_ends_a_container_with_78(folder: Path) -> None:
    daemon = Daemon(folder, "process")
    daemon.program = ("-c", FIRST)
    daemon.configure("[[agents]]\nid = ''\n")
    daemon.process = daemon.spawn()
    assert await daemon.ended() == 78
