"""agentd as process 1 of a container without an init."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentd.host.processes import read_children, read_stat
from support import fork_server
from support.daemon import Daemon
from support.waiting import until

pytestmark = pytest.mark.needs("root")
CAPABILITIES = "-all,+chown,+dac_override,+kill,+setgid,+setuid"
"""Those that the page on containers names; engines grant no CAP_SYS_PTRACE by default."""
FIRST = """
import os, sys
container = ["unshare", {options}"--pid", "--fork", "--mount-proc", "--kill-child"]
os.execvp("unshare", [*container, {rights}sys.executable, "-m", "agentd", *sys.argv[1:]])
"""
OF_ENGINES = {"options": "", "rights": f'"setpriv", "--bounding-set", "{CAPABILITIES}", '}
OF_ONE_USER = {"options": '"--map-root-user", ', "rights": ""}
"""A container of a user without subordinate ids: root is that user, and there is no other."""


@pytest.fixture
async def container(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Daemon]:
    """A daemon that is process 1 of a pid namespace, which ends with it."""
    made = Daemon(folder, "process")
    made.program = ("-c", FIRST.format(**getattr(request, "param", OF_ENGINES)))
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


@pytest.mark.parametrize("options", [(), ("-t",)], ids=["pipes", "terminal"])
async def test_exec_needs_no_more_than_a_container_has(
    container: Daemon, options: tuple[str, ...]
) -> None:
    await container.running(kernel_id="k1", env={"MINE": "a"})
    words = ["--socket", str(container.folder / "agentd.sock"), "exec", *options, "k1", "--"]
    script = "id -un; echo $MINE; grep CapEff /proc/self/status"
    done = await asyncio.to_thread(fork_server.run, "agentctl", *words, "sh", "-c", script)
    expected = ["nobody", "a", "CapEff:\t0000000000000000"]
    assert (done.returncode, done.stdout.splitlines()) == (0, expected), done


@pytest.mark.parametrize("container", [OF_ONE_USER], ids=["one user"], indirect=True)
async def test_kernels_of_a_namespace_of_one_user_are_that_user_s(container: Daemon) -> None:
    """Nobody is not in it, and no process of it may change its groups."""
    kernel = await container.running(kernel_id="k1")
    assert "separation" in kernel["not_enforced"]
    words = ["--socket", str(container.folder / "agentd.sock"), "exec", "k1", "--", "id", "-u"]
    done = await asyncio.to_thread(fork_server.run, "agentctl", *words)
    assert (done.returncode, done.stdout) == (0, "0\n"), done


async def test_refused_configuration_ends_a_container_with_78(folder: Path) -> None:
    daemon = Daemon(folder, "process")
    daemon.program = ("-c", FIRST.format(**OF_ENGINES))
    daemon.configure("[[agents]]\nid = ''\n")
    daemon.process = daemon.spawn()
    assert await daemon.ended() == 78
