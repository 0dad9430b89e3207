"""Process kernels of the field: bundles that move or rot, and shims that are killed."""

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from agentd.core.kernel.states import ObservedState
from agentd.errors import AgentdError, RuntimeFailure, RuntimeUnavailable, StateUnavailable
from agentd.host.cgroups.hierarchies import Cgroup
from agentd.host.processes import Proc, read_stat
from agentd.program.boot_id import boot_id
from agentd.runtimes.process import kernel_processes
from agentd.runtimes.process.bundle import Bundle, ShimIdentity
from agentd.runtimes.process.runtime import ProcessRuntime
from contracts.test_runtime import NODE, process_runtime
from runtimes.process.rig import K1, bundle, command, create, found, is_running, shim
from support.logs import read_log
from support.waiting import until

CGROUPS = [pytest.param(True, marks=pytest.mark.needs("cgroups"), id="cgroups"), False]
SLEEPER = "sleep 1000"


def runtime_on(kernels: Path, *, has_cgroups: bool = False, boot: str | None = None, **settings):
    """A process runtime as after a start; without cgroups, shims are not units either."""
    made = process_runtime(kernels, boot=boot, **settings)
    return ProcessRuntime(
        kernels,
        NODE,
        boot or boot_id(),
        settings=made._settings,
        accounts=made._user_accounts,
        cgroups=made._cgroups if has_cgroups else None,
    )


@pytest.fixture
def kernels(folder: Path) -> Path:
    path = folder / "kernels"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(params=CGROUPS)
def has_cgroups(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
async def bare(kernels: Path) -> AsyncIterator[ProcessRuntime]:
    """The process runtime of a host without cgroups; its kernels are removed afterwards."""
    runtime = runtime_on(kernels)
    yield runtime
    for kernel in (await runtime.list_kernels()).kernels:
        await runtime.remove(kernel.ref)
    await runtime.close()


async def printed_pid(runtime: ProcessRuntime) -> Proc:
    """Return the process whose pid the kernel has printed."""

    async def log() -> bytes:
        return (await read_log(runtime, K1))[1]

    pid = int(await until(log, lambda text: text.endswith(b"\n")))
    stat = read_stat(pid)
    assert stat is not None
    return Proc(pid, stat.start_time)


async def killed(process: Proc) -> None:
    process.signal(signal.SIGKILL)
    await process.wait()


# --- the state folder moves -----------------------------------------------------------------


@pytest.mark.parametrize("has_cgroups", CGROUPS, indirect=True)
async def test_moved_bundle_keeps_log_and_exit_status(folder: Path, has_cgroups: bool) -> None:
    (folder / "kernels").mkdir(mode=0o700)
    go = folder / "go"
    script = f"until [ -e {go} ]; do sleep 0.05; done; yes | head -c 150000; echo end; exit 7"
    size = {"log_max_size": 1 << 16, "log_max_files": 5}
    before = runtime_on(folder / "kernels", has_cgroups=has_cgroups, **size)
    await create(before, "sh", "-c", script)
    await before.close()
    (folder / "kernels").rename(folder / "moved")
    after = runtime_on(folder / "moved", has_cgroups=has_cgroups, **size)
    assert await is_running(after)
    go.touch()
    kernel = await until(lambda: found(after), lambda k: k.state is ObservedState.EXITED)
    assert (kernel.ending.exit_code, kernel.ending.reason) == (7, "")
    log = (await read_log(after, K1))[1]
    assert (len(log), log[-6:]) == (150004, b"y\nend\n")
    await after.remove(K1)
    await after.close()


async def test_end_that_could_not_be_renamed_is_read(bare, folder: Path) -> None:
    await create(bare, "sh", "-c", "exit 7")
    await until(lambda: is_running(bare), lambda runs: not runs)
    (bundle(folder) / "exit.json").rename(bundle(folder) / ".exit.json")
    assert (await found(bare)).ending.exit_code == 7


@pytest.mark.needs("systemd-tmpfiles")
async def test_tmpfiles_leaves_the_bundle_of_a_kernel_alone(bare, folder: Path) -> None:
    """Debian 13 empties /tmp after ten days: systemd/systemd#30760, sonic-buildimage#29395."""
    go = folder / "go"
    await create(bare, "sh", "-c", f"until [ -e {go} ]; do sleep 0.05; done; exit 7")
    (folder / "kernels" / "old").mkdir()
    (folder / "clean.conf").write_text(f"e {folder}/kernels - - - 0\n")
    subprocess.run(["systemd-tmpfiles", "--clean", folder / "clean.conf"], check=True)
    assert {path.name for path in (folder / "kernels").iterdir()} == {"k1"}
    assert await is_running(runtime_on(folder / "kernels"))
    go.touch()
    kernel = await until(lambda: found(bare), lambda k: k.state is ObservedState.EXITED)
    assert kernel.ending.exit_code == 7


# --- the shim is killed ---------------------------------------------------------------------

DAEMONIZED: dict[str, tuple[str, bool]] = {
    "command ended": (f"setsid {SLEEPER} & echo $!", False),
    "command lives": (f"(setsid {SLEEPER} & echo $!); exec {SLEEPER}", True),
    "without its variables": (f"env -i setsid {SLEEPER} & echo $!", False),
    "two deep": (f"(setsid sh -c 'sleep 1000 & echo $!; wait' &); exec {SLEEPER}", True),
    "of the command": (f"setsid {SLEEPER} & echo $!; wait", True),
}
"""A kernel with a child of its own session, and whether its command goes on."""


@pytest.mark.parametrize("case", DAEMONIZED)
async def test_daemonized_child_of_a_killed_shim_holds(bare, folder: Path, case: str) -> None:
    script, lives = DAEMONIZED[case]
    await create(bare, "sh", "-c", script)
    child = await printed_pid(bare)
    note = bundle(folder) / "descendants.json"
    await until(lambda: note.exists() and f'"pid": {child.pid},' in note.read_text())
    shim(folder).signal(signal.SIGKILL)
    if lives:
        command(folder).signal(signal.SIGKILL)
        await command(folder).wait()
    await shim(folder).wait()
    after = runtime_on(folder / "kernels")  # a daemon that begins now
    assert await is_running(bare)
    assert await is_running(after)
    ending = asyncio.create_task(after._bundles.kernel_processes("k1").wait_ended())
    await killed(child)
    await asyncio.wait_for(ending, 20)
    kernel = await found(after)
    assert kernel.state is ObservedState.EXITED
    assert "its shim was killed" in kernel.ending.reason
    await after.close()


async def test_stop_ends_what_a_killed_shim_left(bare, folder: Path) -> None:
    await create(bare, "sh", "-c", DAEMONIZED["command ended"][0])
    child = await printed_pid(bare)
    await until((bundle(folder) / "descendants.json").exists)
    await killed(shim(folder))
    await bare.stop(K1, 0)
    assert not child.is_alive()
    assert (await found(bare)).state is ObservedState.EXITED


async def test_children_of_a_kernel_without_its_shim_are_noted(
    bare, folder: Path, monkeypatch
) -> None:
    """The daemon sees the shim's end, and notes from then on."""
    monkeypatch.setattr(kernel_processes, "MAX_NOTE_PAUSE_S", 0.1)
    (folder / "out").mkdir()
    (folder / "out").chmod(0o777)
    go, out = folder / "go", folder / "out" / "pid"
    script = f"until [ -e {go} ]; do sleep 0.05; done; setsid {SLEEPER} & echo $! >{out}; wait"
    await create(bare, "sh", "-c", script)
    events = bare.watch_events()
    await anext(events)
    await killed(shim(folder))
    go.touch()
    pid = int(await until(lambda: out.exists() and out.read_text()))
    note = bundle(folder) / "descendants.json"
    await until(
        lambda: note.exists() and note.read_text(), lambda text: f'"pid":{pid},' in str(text)
    )
    await killed(command(folder))
    assert await is_running(bare)
    await bare.stop(K1, 0)
    await events.aclose()


NOTES: dict[str, tuple[object, bool]] = {
    "pids only": ([1], True),
    "another value": ("{", True),
    "no start": ([{"pid": 0}], True),
    "older than the command": ([{"pid": 1, "start_time": 1}], False),
}


@pytest.mark.parametrize("case", NOTES)
async def test_damaged_note_holds_unless_an_end_is_known(bare, folder: Path, case: str) -> None:
    await create(bare, "true")
    await until(lambda: is_running(bare), lambda runs: not runs)
    note, ending = bundle(folder) / "descendants.json", bundle(folder) / "exit.json"
    pids, is_damaged = NOTES[case]
    note.write_text(json.dumps(pids))
    assert not await is_running(bare)
    ending.rename(folder / "ending")
    assert await is_running(bare) == is_damaged
    assert ("descendants.json: is damaged" in (await found(bare)).record_problem) == is_damaged
    (folder / "ending").rename(ending)


async def test_unreadable_note_holds_the_child_of_a_killed_shim(bare, folder: Path) -> None:
    await create(bare, "sh", "-c", DAEMONIZED["command ended"][0])
    child = await printed_pid(bare)
    await until((bundle(folder) / "descendants.json").exists)
    await killed(shim(folder))
    mend = as_link(bundle(folder) / "descendants.json")
    after = runtime_on(folder / "kernels")
    for runtime in (bare, after):
        kernel = await found(runtime)
        assert (kernel.state, kernel.is_unreadable) == (ObservedState.RUNNING, True)
        assert "descendants.json: Too many levels" in kernel.record_problem
        with pytest.raises(RuntimeUnavailable):
            await runtime.remove(K1)
    mend()
    assert not (await found(after)).is_unreadable
    await killed(child)
    assert not await is_running(after)
    await after.close()


async def open_to_a_group(bare, folder: Path, monkeypatch) -> None:
    bundle(folder).chmod(0o770)


async def on_a_dead_disk(bare, folder: Path, monkeypatch) -> None:
    failing(monkeypatch, "open", bundle(folder), "EIO")


async def removed(bare, folder: Path, monkeypatch) -> None:
    shutil.rmtree(bundle(folder))


@pytest.mark.parametrize("happens", [open_to_a_group, on_a_dead_disk, removed])
async def test_child_of_a_killed_shim_holds_without_its_bundle(
    bare, folder: Path, monkeypatch, happens: Callable[..., Awaitable[None]]
) -> None:
    await create(bare, "sh", "-c", DAEMONIZED["command ended"][0])
    child = await printed_pid(bare)
    note = bundle(folder) / "descendants.json"
    await until(lambda: note.exists() and f'"pid": {child.pid},' in note.read_text())
    assert await is_running(bare)
    await killed(shim(folder))
    await happens(bare, folder, monkeypatch)
    assert (await found(bare)).state is ObservedState.RUNNING
    await killed(child)
    ended = await bare.find(K1)
    assert ended is None if happens is removed else ended.state is ObservedState.EXITED


@pytest.mark.parametrize("has_cgroup", [False, True])
@pytest.mark.parametrize("group", ["no cgroups", "no such group"])
def test_damaged_identity_that_names_init_proves_nothing(
    folder: Path, group: str, *, has_cgroup: bool
) -> None:
    """Its process group, and its descendants, are everybody's."""
    init = read_stat(1)
    identity = ShimIdentity(1, init.start_time, "b", 2**31 - 1, 1, has_cgroup, 0.0)
    bundle(folder).mkdir(parents=True, mode=0o700)
    (bundle(folder) / "lock").touch(0o600)
    (bundle(folder) / "identity.json").write_bytes(msgspec.json.encode(identity))
    cgroup = Cgroup((folder / "pids" / "k1",)) if group == "no such group" else None
    processes = kernel_processes.KernelProcesses(Bundle(bundle(folder)), cgroup, "b")
    assert (processes.is_running, processes.members()) == (False, [])


LATER_HIERARCHIES: dict[str, tuple[str, ...]] = {
    "as created": ("pids",),
    "memory is writable again": ("memory", "pids"),
    "another one": ("memory",),
    "none": (),
}


@pytest.mark.parametrize("case", LATER_HIERARCHIES)
async def test_living_command_holds_in_other_hierarchies(bare, folder: Path, case: str) -> None:
    """A kernel of v1 that began while only `pids` was writable; then its shim is killed."""
    await create(bare, "sleep", "1000")
    await killed(shim(folder))
    file = bundle(folder) / "identity.json"
    identity = json.loads(file.read_text())
    file.write_text(json.dumps(identity | {"has_cgroup": True}))
    (folder / "memory").mkdir()
    (folder / "pids" / "k1").mkdir(parents=True)
    (folder / "pids" / "k1" / "cgroup.procs").write_text(f"{identity['pid']}\n")
    names = LATER_HIERARCHIES[case]
    group = Cgroup(tuple(folder / name / "k1" for name in names)) if names else None
    processes = kernel_processes.KernelProcesses(Bundle(bundle(folder)), group, boot_id())
    assert processes.is_running
    assert processes.state()[0] is ObservedState.RUNNING


# --- files that cannot be read --------------------------------------------------------------


UNREADABLE = ("EACCES", "EPERM", "EIO", "ESTALE", "ELOOP", "ENOTDIR", "ETIMEDOUT", "ENODEV")
PASSING = ("EMFILE", "ENFILE", "ENOMEM", "EINTR")


def failing(monkeypatch: pytest.MonkeyPatch, function: str, path: Path, name: str) -> None:
    """Make a function of `os` fail for a path."""
    genuine = getattr(os, function)

    def fails(target: object, *args: object, **kwargs: object) -> object:
        if target == path:
            number = getattr(errno, name)
            raise OSError(number, os.strerror(number), str(path))
        return genuine(target, *args, **kwargs)

    monkeypatch.setattr(os, function, fails)


@pytest.mark.parametrize("name", UNREADABLE)
async def test_bundle_with_an_error_is_held(bare, folder: Path, monkeypatch, name: str) -> None:
    await create(bare, "sleep", "1000")
    after = runtime_on(folder / "kernels")
    with monkeypatch.context() as patch:
        failing(patch, "open", bundle(folder), name)
        for runtime in (bare, after):
            kernel = await found(runtime)
            assert (kernel.state, kernel.is_unreadable) == (ObservedState.RUNNING, True)
            assert os.strerror(getattr(errno, name)) in kernel.record_problem
        assert await is_running(bare)
        with pytest.raises(RuntimeUnavailable):
            await after.remove(K1)  # it knows neither a pid nor a lock
    assert not (await found(after)).is_unreadable
    await after.close()


async def test_locks_without_a_server_are_unreadable(bare, folder: Path, monkeypatch) -> None:
    """A home on NFS whose lock manager is down: ENOLCK."""
    await create(bare, "sleep", "1000")
    after = runtime_on(folder / "kernels")
    with monkeypatch.context() as patch:
        error = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        patch.setattr("agentd.runtimes.process.bundle.fcntl.fcntl", Mock(side_effect=error))
        kernel = await found(after)
        assert kernel.state is ObservedState.RUNNING
    await after.close()


@pytest.mark.parametrize("name", PASSING)
async def test_shortage_proves_nothing(bare, folder: Path, monkeypatch, name: str) -> None:
    await create(bare, "sleep", "1000")
    with monkeypatch.context() as patch:
        failing(patch, "open", bundle(folder), name)
        with pytest.raises(RuntimeUnavailable):
            await bare.list_kernels()
    assert await is_running(bare)


REFUSALS: dict[str, type[AgentdError]] = {
    "EIO": StateUnavailable,
    "EROFS": StateUnavailable,
    "ENOMEM": RuntimeUnavailable,
    "EACCES": RuntimeFailure,
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_create_over_an_unknown_bundle_is_refused(
    bare, folder: Path, monkeypatch, name: str
) -> None:
    await create(bare, "sleep", "1000")
    with monkeypatch.context() as patch:
        for function in ("stat", "lstat"):  # `Path.lstat` calls one of them, by Python's version
            failing(patch, function, bundle(folder), name)
        with pytest.raises(REFUSALS[name]):
            await create(bare, "true")
    assert await is_running(bare)


def as_link(path: Path) -> Callable[[], object]:
    """Put a link in a file's place; return what mends it."""
    kept = path.with_name(f"kept-{path.name}")
    path.rename(kept)
    path.symlink_to(kept.name)

    def mend() -> None:
        path.unlink()
        kept.rename(path)

    return mend


async def test_unreadable_identity_holds_a_kernel_without_shim(bare, folder: Path) -> None:
    await create(bare, "sleep", "1000")
    process = command(folder)
    await killed(shim(folder))
    mend = as_link(bundle(folder) / "identity.json")
    after = runtime_on(folder / "kernels")
    kernel = await found(after)
    assert (kernel.state, kernel.is_unreadable) == (ObservedState.RUNNING, True)
    assert "identity.json: Too many levels of symbolic links" in kernel.record_problem
    mend()
    assert not (await found(after)).is_unreadable
    await killed(process)
    assert not await is_running(after)
    await after.close()


async def test_unreadable_exit_status_is_said_and_mended(bare, folder: Path) -> None:
    await create(bare, "sh", "-c", "exit 7")
    await until(lambda: is_running(bare), lambda runs: not runs)
    mend = as_link(bundle(folder) / "exit.json")
    kernel = await found(bare)
    assert kernel.state is ObservedState.EXITED
    assert "exit.json: Too many levels of symbolic links" in kernel.ending.reason
    mend()
    assert (await found(bare)).ending.exit_code == 7
