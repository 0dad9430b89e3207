"""Locks of real daemons: what other users can do, and what a clean-up of old files can."""

import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.daemon import Daemon
from support.waiting import until

AS_USER = """
import os, runpy, sys
os.geteuid = lambda: {user}
sys.argv[0] = "agentd"
runpy.run_module("agentd", run_name="__main__")
"""
"""agentd of another user, who need not be able to run this Python."""
QUICK = {"agentd.daemon.lifecycle.LOCK_PAUSE_S": 0.05}


@pytest.fixture
async def daemons(folder: Path) -> AsyncIterator[tuple[Daemon, Daemon]]:
    """Two daemons of one node id, with state folders of their own."""
    made = []
    for name in ("one", "two"):
        (folder / name).mkdir()
        made.append(Daemon(folder / name, "process"))
        made[-1].node, made[-1].run_folder = folder.name, folder / "run"
    yield made[0], made[1]
    for daemon in made:
        if daemon.process is not None:
            await daemon.close()
        else:
            daemon.notes.close()


def lock_of(daemon: Daemon) -> Path:
    return daemon.run_folder / f"node-{daemon.node}.lock"


def as_user(daemon: Daemon, user: int) -> dict[str, str]:
    """Make a daemon that of another user; return its environment, as of cron."""
    home = daemon.folder / "home"
    home.mkdir()
    os.chown(home, user, user)
    daemon.program = ("-c", AS_USER.format(user=user))
    return {"HOME": str(home), "XDG_RUNTIME_DIR": ""}


async def test_second_daemon_is_refused_after_a_clean_up(
    daemons: tuple[Daemon, Daemon],
) -> None:
    one, two = daemons
    one.deadlines = QUICK
    await one.start()
    for path in (lock_of(one), one.folder / "state/lock"):
        path.unlink()
        await until(path.exists, True, text=f"{path} again")
    two.configure()
    two.process = two.spawn()
    assert await two.ended() == 1
    assert f"another agentd serves node id {one.node} on this host (pid" in two.log
    assert await one.stop() == 0
    assert not lock_of(one).exists()
    assert not (one.folder / "state/lock").exists()


async def test_first_daemon_ends_if_another_was_faster(daemons: tuple[Daemon, Daemon]) -> None:
    one, two = daemons
    one.deadlines = QUICK
    await one.start()
    kernel = await one.running()
    assert one.process is not None
    one.process.send_signal(signal.SIGSTOP)
    lock_of(one).unlink()
    await two.start()
    one.process.send_signal(signal.SIGCONT)
    assert await one.ended() == 1
    assert f"another agentd serves node id {one.node}" in one.log
    assert Path(f"/proc/{one.main_pid(kernel)}").exists(), "its kernels continue"
    await two.stop()
    await one.start()
    await one.until(kernel["kernel_id"], "running")


@pytest.mark.needs("root")
async def test_two_users_serve_the_same_node_id(daemons: tuple[Daemon, Daemon]) -> None:
    """Which is derived from the machine id, so it is the same for all."""
    one, two = daemons
    folders = []
    for daemon, user in ((one, 4711), (two, 4712)):
        environ = as_user(daemon, user)
        await daemon.start(**environ)
        folders.append(Path(environ["HOME"], ".local/state/agentd"))
    assert [[path.name for path in folder.iterdir()] for folder in folders] == [
        [f"node-{one.node}.lock"]
    ] * 2
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}


@pytest.mark.needs("root")
async def test_one_user_serves_a_node_id_once(daemons: tuple[Daemon, Daemon]) -> None:
    one, two = daemons
    environ = as_user(one, 4711)
    await one.start(**environ)
    two.program = one.program
    two.configure()
    two.process = two.spawn(**environ)
    assert await two.ended() == 1
    assert f"another agentd serves node id {one.node}" in two.log


@pytest.mark.needs("root")
async def test_a_logout_moves_the_lock_of_a_daemon_that_stays(
    daemons: tuple[Daemon, Daemon],
) -> None:
    """The last logout removes $XDG_RUNTIME_DIR; a daemon that cron starts then has none."""
    one, two = daemons
    environ = as_user(one, 4711)
    session = one.folder / "session"
    session.mkdir(0o700)
    os.chown(session, 4711, 4711)
    await one.start(**environ | {"XDG_RUNTIME_DIR": str(session)})
    assert (session / "agentd" / f"node-{one.node}.lock").exists()
    shutil.rmtree(session)
    lock = Path(environ["HOME"], ".local/state/agentd", f"node-{one.node}.lock")
    await until(lock.exists, True, text=f"{lock}")
    two.program = one.program
    two.configure()
    two.process = two.spawn(**environ)
    assert await two.ended() == 1
    assert f"another agentd serves node id {one.node}" in two.log
