"""The lock of a host, with real files and locks."""

import asyncio
import errno
import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentd.state import host_lock
from agentd.state.host_lock import HostLock

Agentd = Callable[..., HostLock]
OTHER = {"node_id": "other", "pid": 17, "boot_id": "boot-1"}


@pytest.fixture
def agentd(folder: Path) -> Iterator[Agentd]:
    """Make agentds that share a folder; end them without a word when the test is over."""
    locks: list[HostLock] = []

    def make(node_id: str, boot_id: str = "boot-1", *, is_user: bool = False) -> HostLock:
        locks.append(HostLock(folder, node_id, boot_id, is_unprivileged=is_user))
        return locks[-1]

    yield make
    for lock in locks:
        kill(lock)


def kill(lock: HostLock) -> None:
    lock._close()


def line_in(folder: Path) -> dict | None:
    text = (folder / "host.lock").read_text()
    return json.loads(text) if text else None


async def test_one_of_many_that_start_at_once_serves(agentd: Agentd, folder: Path) -> None:
    locks = [agentd(f"n{number}") for number in range(20)]
    await asyncio.gather(*(lock.acquire() for lock in locks))
    (winner,) = [lock for lock in locks if not lock.reason]
    line = line_in(folder)
    assert line is not None
    assert winner is locks[int(line["node_id"].removeprefix("n"))]
    reasons = {lock.reason.partition(";")[0] for lock in locks} - {""}
    assert reasons == {f"served by agentd {line['node_id']} (pid {os.getpid()}"}


@pytest.mark.parametrize(
    ("is_restart", "is_used", "is_known", "stays"),
    [
        (False, False, True, False),
        (False, True, True, True),
        (False, False, False, False),
        (True, False, True, False),
        (True, True, False, True),
        (True, False, False, True),
    ],
)
async def test_a_stop_empties_the_line_if_nothing_is_used(
    agentd: Agentd, folder: Path, is_restart: bool, is_used: bool, is_known: bool, stays: bool
) -> None:
    if is_restart:
        before = agentd("one")
        await before.acquire()
        kill(before)
    one = agentd("one")
    await one.acquire()
    one.set_in_use(is_used=is_used, is_known=is_known)
    one.release()
    assert (line_in(folder) is not None) is stays
    two = agentd("two")
    await two.acquire()
    assert bool(two.reason) is stays


async def test_failed_start_leaves_the_line_as_it_was(agentd: Agentd, folder: Path) -> None:
    first = agentd("one")
    await first.acquire()
    first.release()
    assert line_in(folder) is None
    second = agentd("one")
    await second.acquire()
    kill(second)
    third = agentd("one")
    await third.acquire()
    third.release()
    assert line_in(folder) is not None, "kernels of the second may be left"


@pytest.mark.parametrize(
    "content",
    [b"{", b"\xff\n", b"[]", b'{"node_id": "x"}', b"[" * 4000, b"x" * 10000]
    + [json.dumps(OTHER | {"node_id": bad}).encode() for bad in ("\x1b[2J", "", "a b")],
)
@pytest.mark.parametrize("is_user", [False, True])
async def test_damaged_line_withholds_the_accelerators(
    agentd: Agentd, folder: Path, content: bytes, is_user: bool
) -> None:
    file = folder / "host.lock"
    file.write_bytes(content)
    one = agentd("one", is_user=is_user)
    await one.acquire()
    assert one.reason.startswith(str(file))
    assert "delete it" in one.reason
    one.release()
    assert file.read_bytes() == content


@pytest.mark.parametrize("content", [b"", b"\n", b"  \n", json.dumps(OTHER | {"boot_id": "b"})])
@pytest.mark.parametrize("is_user", [False, True])
async def test_empty_line_or_one_of_another_boot_is_none(
    agentd: Agentd, folder: Path, content: bytes | str, is_user: bool
) -> None:
    text = content if isinstance(content, str) else content.decode()
    (folder / "host.lock").write_text(text)
    one = agentd("one", is_user=is_user)
    await one.acquire()
    assert one.reason == ""


@pytest.mark.parametrize("kind", ["folder", "link", "FIFO"])
async def test_another_kind_of_file_withholds_the_accelerators(
    agentd: Agentd, folder: Path, kind: str
) -> None:
    file = folder / "host.lock"
    match kind:
        case "folder":
            file.mkdir()
        case "link":
            file.symlink_to("/etc/hostname")
        case _:
            os.mkfifo(file)
    one = agentd("one")
    await one.acquire()
    assert str(file) in one.reason
    one.release()


async def test_missing_run_folder_is_made(folder: Path) -> None:
    one = HostLock(folder / "run/agentd", "one", "boot-1", is_unprivileged=False)
    await one.acquire()
    assert (one.reason, (folder / "run/agentd/host.lock").exists()) == ("", True)
    one.release()


async def test_run_folder_that_cannot_be_made_is_a_warning() -> None:
    one = HostLock(Path("/proc/nowhere"), "one", "boot-1", is_unprivileged=False)
    await one.acquire()
    assert one.reason == ""
    (warning,) = map(str, one.conditions())
    assert "cannot be written" in warning
    one.release()


async def test_lock_of_an_unknown_process_withholds(
    agentd: Agentd, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_lock, "LOCK_TIMEOUT_S", 0.05)
    one = agentd("one")
    with (folder / "host.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        await one.acquire()
    assert one.reason == f"another process has locked {folder}/host.lock"


@pytest.mark.needs("root")
@pytest.mark.parametrize("is_parent_gone", [False, True])
async def test_lock_of_another_user_does_not_count(
    agentd: Agentd, folder: Path, *, is_parent_gone: bool
) -> None:
    """Also if the process that took it has ended, and its child holds it."""
    folder.chmod(0o755)
    (folder / "host.lock").touch(0o644)
    script = 'exec 9<"$0"; flock 9; echo $$; exec sleep 1000'
    if is_parent_gone:
        script = 'exec 9<"$0"; flock 9; sleep 1000 & echo $!'
    command = ["sh", "-c", script, str(folder / "host.lock")]
    nobody = subprocess.Popen(command, stdout=subprocess.PIPE, user=65534)
    assert nobody.stdout is not None
    holder = int(nobody.stdout.readline())
    try:
        if is_parent_gone:
            nobody.wait()
        one, two = agentd("one"), agentd("two")
        await one.acquire()
        assert (one.reason, [*one.conditions()]) == ("", [])
        await two.acquire()
        assert two.reason.startswith("served by agentd one")
    finally:
        os.kill(holder, signal.SIGKILL)
        nobody.wait()
        nobody.stdout.close()


async def test_lock_of_a_moment_is_waited_for(agentd: Agentd, folder: Path) -> None:
    one = agentd("one")
    with (folder / "host.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        acquiring = asyncio.create_task(one.acquire())
        await asyncio.sleep(0)
        assert not acquiring.done()
    await acquiring
    assert one.reason == ""


async def test_users_read_the_line_whatever_the_umask_is(agentd: Agentd, folder: Path) -> None:
    before = os.umask(0o077)
    try:
        await agentd("one").acquire()
    finally:
        os.umask(before)
    assert (folder / "host.lock").stat().st_mode & 0o777 == 0o644


async def test_a_users_agentd_follows_the_line(
    agentd: Agentd, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_lock, "POLL_PAUSE_S", 0.001)
    user, root = agentd("one", is_user=True), agentd("one")
    await user.acquire()
    assert (user.reason, (folder / "host.lock").exists()) == ("", False)
    changes: asyncio.Queue[str] = asyncio.Queue()
    watching = asyncio.create_task(user.watch(lambda: changes.put_nowait(user.reason)))
    async with asyncio.timeout(10):
        await root.acquire()
        assert (await changes.get()).startswith("served by agentd one"), "whatever its node id is"
        root.release()
        assert await changes.get() == ""
        (folder / "host.lock").unlink()
        await root.acquire()
        assert await changes.get()
    watching.cancel()


@pytest.mark.parametrize("is_taken", [False, True])
async def test_a_lock_whose_file_was_removed_is_taken_again(
    agentd: Agentd, folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_taken: bool
) -> None:
    """Unless another agentd took it first: then that one serves the accelerators."""
    monkeypatch.setattr(host_lock, "POLL_PAUSE_S", 0.001)
    one, two = agentd("one"), agentd("two")
    await one.acquire()
    (folder / "host.lock").unlink()
    if is_taken:
        await two.acquire()
    changes: asyncio.Queue[str] = asyncio.Queue()
    watching = asyncio.create_task(one.watch(lambda: changes.put_nowait(one.reason)))
    async with asyncio.timeout(10):
        if is_taken:
            assert (await changes.get()).startswith("served by agentd two")
        else:
            while not (folder / "host.lock").exists() or line_in(folder) is None:
                await asyncio.sleep(0.001)
            await two.acquire()
            assert two.reason.startswith("served by agentd one")
    watching.cancel()


async def test_a_lock_that_could_not_be_written_is_tried_again(
    agentd: Agentd, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_lock, "POLL_PAUSE_S", 0.001)
    one, failures = agentd("one"), [errno.ENOSPC] * 3

    def is_full(*_: object, **__: object) -> None:
        if failures:
            raise OSError(failures.pop(), "No space left on device")

    monkeypatch.setattr(Path, "mkdir", is_full)
    await one.acquire()
    (condition,) = one.conditions()
    assert condition.reason.startswith(f"{folder}/host.lock cannot be written: No space left")
    watching = asyncio.create_task(one.watch(lambda: None))
    async with asyncio.timeout(10):
        while [*one.conditions()]:
            await asyncio.sleep(0.001)
    line = line_in(folder)
    assert line is not None
    assert line["node_id"] == "one"
    watching.cancel()
