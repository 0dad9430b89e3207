import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentd.core.claim.claim import CgroupHolder, ProcessHolder
from agentd.host.claim_holders import HolderObserver, NoSuchHolder
from agentd.host.processes import read_stat

OWN = os.getpid()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def start_of(pid: int) -> int:
    stat = read_stat(pid)
    assert stat is not None
    return stat.start_time


async def test_caller_names_itself_and_its_child(child: subprocess.Popen[bytes]) -> None:
    holders = HolderObserver()
    for pid in (OWN, child.pid):
        found = holders.find_process(pid, None, caller_pid=OWN, caller_uid=os.getuid())
        assert found == ProcessHolder(pid, start_of(pid))
        assert holders.is_alive(found)
        assert not holders.is_alive(ProcessHolder(pid, 1))


async def test_holder_that_cannot_be_observed_counts_as_alive(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("agentd.host.claim_holders.open_pidfd", fails)
    holder = ProcessHolder(child.pid, 1)
    assert HolderObserver().is_alive(holder)
    with pytest.raises(OSError, match="Too many open files"):
        HolderObserver().watch(holder, lambda: None)


@pytest.fixture
def thread() -> Iterator[int]:
    """The id of a thread of this process."""
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    assert other.native_id is not None
    yield other.native_id
    end.set()
    other.join()


@pytest.mark.parametrize("number", [0, errno.ENOENT, errno.EINVAL, errno.ESRCH])
async def test_thread_is_no_holder_and_its_id_is_no_process(
    thread: int, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As this Linux says it (0), and as others do: ENOENT since 6.9, EINVAL before."""

    def fails(pid: int) -> int:
        raise OSError(number, os.strerror(number))

    if number:
        monkeypatch.setattr(os, "pidfd_open", fails)
    holders, ended = HolderObserver(), asyncio.Event()
    with pytest.raises(NoSuchHolder):
        holders.find_process(thread, start_of(thread), caller_pid=OWN, caller_uid=None)
    holder = ProcessHolder(thread, start_of(thread))
    assert not holders.is_alive(holder)
    holders.watch(holder, ended.set)
    async with asyncio.timeout(10):
        await ended.wait()


@pytest.mark.needs("root")
async def test_process_of_another_pid_namespace_is_refused() -> None:
    script = "import time; time.sleep(1000)"
    outer = subprocess.Popen(["unshare", "--pid", "--fork", sys.executable, "-c", script])
    try:
        async with asyncio.timeout(10):
            while not (inner := Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text()):
                await asyncio.sleep(0.01)
        pid = int(inner)
        with pytest.raises(NoSuchHolder):
            HolderObserver().find_process(pid, start_of(pid), caller_pid=OWN, caller_uid=None)
        with pytest.raises(NoSuchHolder):
            HolderObserver().find_process(OWN, start_of(OWN), caller_pid=pid, caller_uid=None)
        os.kill(pid, signal.SIGKILL)
    finally:
        outer.wait()


async def test_end_of_a_process_is_told_once(child: subprocess.Popen[bytes]) -> None:
    ended: asyncio.Queue[str] = asyncio.Queue()
    holder = ProcessHolder(child.pid, start_of(child.pid))
    HolderObserver().watch(holder, lambda: ended.put_nowait("ended"))
    await asyncio.sleep(0)
    assert ended.empty()
    child.kill()
    async with asyncio.timeout(10):
        assert await ended.get() == "ended"
    assert ended.empty()


@pytest.mark.parametrize("start", [0, 1])
async def test_process_with_another_start_has_ended(start: int) -> None:
    ended = asyncio.Event()
    HolderObserver().watch(ProcessHolder(OWN, start), ended.set)
    async with asyncio.timeout(10):
        await ended.wait()


async def test_stopped_watch_tells_nothing(child: subprocess.Popen[bytes]) -> None:
    ended = asyncio.Event()
    holder = ProcessHolder(child.pid, start_of(child.pid))
    stop = HolderObserver().watch(holder, ended.set)
    stop()
    stop()
    child.kill()
    child.wait()
    await asyncio.sleep(0.05)
    assert not ended.is_set()


async def test_leader_that_exits_before_its_threads_has_not_ended() -> None:
    script = (
        "import ctypes, sys, threading, time\n"
        "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "print('up', flush=True)\n"
        "ctypes.CDLL(None).syscall(60, 0)"  # exit(2) of the leader alone, x86-64
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        async with asyncio.timeout(10):
            while (stat := read_stat(process.pid)) is not None and stat.state != "Z":
                await asyncio.sleep(0.01)
        assert stat is not None
        ended = asyncio.Event()
        HolderObserver().watch(ProcessHolder(process.pid, stat.start_time), ended.set)
        await asyncio.sleep(0.05)
        assert not ended.is_set()
        process.kill()
        async with asyncio.timeout(10):
            await ended.wait()
    finally:
        process.kill()
        process.wait()


def unified() -> Path | None:
    return HolderObserver()._find_mount()


@pytest.fixture(params=["", "\udcff\r"], ids=["plain", "any bytes"])
def group(request: pytest.FixtureRequest) -> Iterator[Path]:
    root = unified()
    if root is None or os.getuid() != 0:
        pytest.skip("needs root and a cgroup hierarchy of version 2")
    folder = root / f"agentd-test-{OWN}{request.param}"
    folder.mkdir()
    yield folder
    if folder.exists():
        folder.rmdir()


async def test_cgroup_ends_with_its_last_process(
    group: Path, child: subprocess.Popen[bytes]
) -> None:
    (group / "cgroup.procs").write_text(str(child.pid))
    holders = HolderObserver()
    path = f"/{group.name}"
    found = holders.find_cgroup(path, [], [])
    assert holders.is_alive(found)
    assert not holders.is_alive(CgroupHolder(path, found.inode + 1))
    assert found == CgroupHolder(path, group.stat().st_ino)
    with pytest.raises(NoSuchHolder, match="holds agentd or a kernel"):
        holders.find_cgroup(path, [child.pid], [])
    ended = asyncio.Event()
    holders.watch(found, ended.set)
    await asyncio.sleep(0.05)
    assert not ended.is_set()
    child.kill()
    child.wait()
    async with asyncio.timeout(10):
        await ended.wait()
    assert not holders.is_alive(found)


async def test_cgroup_ends_if_it_lives_for_milliseconds(group: Path) -> None:
    """Linux drops the notification of an end that follows another change within 10 ms."""
    folders = [group / str(number) for number in range(5)]

    def end(folder: Path, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        folder.rmdir()

    async with asyncio.timeout(10):
        for folder in folders:
            folder.mkdir()
            process = subprocess.Popen(["sleep", "1000"])
            (folder / "cgroup.procs").write_text(str(process.pid))
            ended = asyncio.Event()
            found = HolderObserver().find_cgroup(f"/{group.name}/{folder.name}", [], [])
            HolderObserver().watch(found, ended.set)
            await asyncio.to_thread(end, folder, process)
            await ended.wait()


async def test_no_claim_ends_with_the_cgroup_above_a_container(
    group: Path, child: subprocess.Popen[bytes]
) -> None:
    container = "ab" * 32
    inner = group / "machine.slice" / f"docker-{container}.scope"
    inner.mkdir(parents=True)
    (inner / "cgroup.procs").write_text(str(child.pid))
    path = f"/{group.name}"
    for cgroup in (path, f"{path}/machine.slice/{inner.name}"):
        with pytest.raises(NoSuchHolder, match="holds agentd or a kernel"):
            HolderObserver().find_cgroup(cgroup, [], [container])
    assert HolderObserver().find_cgroup(path, [], ["cd" * 32]).cgroup == path
    child.kill()
    child.wait()
    inner.rmdir()
    inner.parent.rmdir()


async def test_empty_or_foreign_cgroup_is_refused(group: Path) -> None:
    holders = HolderObserver()
    for path in (f"/{group.name}", "/", "", "/../x", "//", f"/{group.name}/", "/nowhere", "x"):
        with pytest.raises(NoSuchHolder):
            holders.find_cgroup(path, [], [])
    ended = asyncio.Event()
    holders.watch(CgroupHolder(f"/{group.name}", 1), ended.set)
    async with asyncio.timeout(10):
        await ended.wait()


def test_process_name_does_not_show_another_pid_namespace(tmp_path: Path) -> None:
    (tmp_path / "500").mkdir()
    (tmp_path / "500/status").write_bytes(b"Name:\tx\rNSpid:\t1\nNSpid:\t500\t1\n")
    assert not HolderObserver(tmp_path)._is_in_namespace(500)
