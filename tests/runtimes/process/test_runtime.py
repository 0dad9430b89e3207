"""Cases of the process runtime only: shims, sessions, identities."""

import asyncio
import errno
import json
import os
import pwd
import signal
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from agentd.core.kernel.observation import Leftover
from agentd.core.kernel.plan import kernel_name
from agentd.core.kernel.record import decode_device_label
from agentd.core.kernel.states import ObservedState
from agentd.errors import KernelConflict, RuntimeUnavailable
from agentd.host.cgroups.hierarchies import find_cgroups
from agentd.host.processes import read_stat
from agentd.program.boot_id import boot_id
from agentd.runtimes.host.user_accounts import UserAccounts
from agentd.runtimes.process.runtime import ProcessRuntime
from agentd.services.protocols import LogQuery
from contracts.test_runtime import NODE, SHARES, plan, process_runtime
from native.libraries import built
from runtimes.process.rig import K1, bundle, command, create, found, identity, is_running, shim


async def without_shim(folder: Path) -> None:
    shim(folder).signal(signal.SIGKILL)
    await shim(folder).wait()


async def has_cgroups(runtime: ProcessRuntime) -> bool:
    """Whether kernels get a cgroup; where they do not, that is told."""
    is_there = find_cgroups() is not None
    support = await runtime.support(plan("sleep").spec)
    assert is_there or {"mem", "pids_limit", "statement"} <= support.not_enforced
    return is_there


async def test_identity_is_on_disk_and_on_the_cgroup(runtime, folder) -> None:
    kernel = await create(runtime, "sleep", "1000")
    who = identity(folder)
    assert who["pid"] == int(kernel.handle)
    assert who["boot_id"] == boot_id()
    stat = read_stat(who["pid"])
    assert stat is not None
    assert (stat.start_time, stat.session) == (who["start_time"], who["pid"])
    env = Path(f"/proc/{who['pid']}/environ").read_bytes().split(b"\0")
    assert not any(item.startswith(b"HOME=/root") for item in env)
    assert Path(f"/proc/{who['shim_pid']}/environ").read_bytes() == b""
    if await has_cgroups(runtime):
        assert decode_device_label(kernel.device_label) == SHARES
        assert kernel.agent_id == "agent-1"
    if os.geteuid() == 0:
        status = Path(f"/proc/{who['pid']}/status").read_text()
        assert "Uid:\t65534\t65534\t65534\t65534" in status
        assert "NoNewPrivs:\t1" in status


async def test_a_kernel_has_ended_only_when_nothing_of_it_is_left(runtime, folder) -> None:
    await create(runtime, "sh", "-c", "setsid sleep 1000 & sleep 1000 & exit 5")
    await command(folder).wait()
    assert await is_running(runtime)
    await runtime.stop(K1, 0)
    ended = await found(runtime)
    assert (ended.state, ended.ending.exit_code) == (ObservedState.EXITED, 5)


async def test_stop_without_timeout_uses_the_configured_one(folder) -> None:
    (folder / "kernels").mkdir()
    runtime = process_runtime(folder / "kernels", stop_timeout=0)
    await create(runtime, "sh", "-c", "trap '' TERM; sleep 1000; sleep 1000")
    await runtime.stop(K1, None)
    assert (await found(runtime)).ending.exit_code == 137
    await runtime.remove(K1)
    await runtime.close()


async def test_a_killed_shim_loses_the_exit_status_and_not_the_kernel(runtime, folder) -> None:
    await create(runtime, "sleep", "1000")
    await without_shim(folder)
    assert await is_running(runtime)
    command(folder).signal(signal.SIGKILL)
    async with asyncio.timeout(20):
        async for seen in runtime.watch_events():
            if seen == "k1" or not await is_running(runtime):
                break
    ended = await found(runtime)
    assert (ended.state, ended.ending.exit_code) == (ObservedState.EXITED, None)
    assert "exit status is lost" in ended.ending.reason


@pytest.mark.parametrize("with_cgroups", [True, False])
async def test_a_kernel_that_forks_and_exits_without_pause_is_ended(folder, with_cgroups) -> None:
    (folder / "kernels").mkdir()
    runtime = process_runtime(folder / "kernels")
    if not with_cgroups:
        runtime = without_cgroups(folder)
    await create(runtime, str(built("chain.c", folder / "chain")))
    async with asyncio.timeout(20):
        await runtime.stop(K1, 0.3)
    assert not await is_running(runtime)
    await runtime.remove(K1)
    await runtime.close()


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("sh", "-c", "env -i setsid sleep 1000 & exit"), id="without its variables"),
        pytest.param(("chain.c", "2000"), id="has moved on"),
        pytest.param(("headless.c",), id="looks like a zombie"),
    ],
)
async def test_cgroup_with_members_proves_a_live_kernel(runtime, folder, words):
    """Of a kernel without a shim, there is one member that nothing else shows to be its own."""
    if not await has_cgroups(runtime):
        return
    program, *arguments = words
    if program.endswith(".c"):
        program = str(built(program, folder / "program"))
    await create(runtime, program, *arguments)
    await without_shim(folder)
    for _ in range(20):
        assert await is_running(process_runtime(folder / "kernels"))
    async with asyncio.timeout(20):
        await runtime.stop(K1, 0)
    assert not await is_running(runtime)
    await runtime.remove(K1)
    cgroups = find_cgroups()
    assert cgroups is not None
    folders = cgroups.group(kernel_name(NODE, "k1")).folders
    assert not any(path.exists() for path in folders)


async def test_pid_of_another_boot_proves_nothing(runtime, folder) -> None:
    await create(runtime, "sleep", "1000")
    await runtime.stop(K1, 0)
    (bundle(folder) / "exit.json").unlink()
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as other:
        stat = read_stat(other.pid)
        assert stat is not None
        its = {"pid": stat.pid, "start_time": stat.start_time, "has_cgroup": False}
        (bundle(folder) / "identity.json").write_text(json.dumps(identity(folder) | its))
        assert await is_running(runtime)
        after = process_runtime(folder / "kernels", boot="another-boot")
        ended = await found(after)
        other.kill()
    assert ended.state is ObservedState.EXITED
    assert "the node restarted" in ended.ending.reason
    await after.remove(K1)
    await after.close()


async def test_processes_are_limited(runtime) -> None:
    if not await has_cgroups(runtime):
        return
    script = "for i in $(seq 50); do sleep 1000 & done; wait"
    await create(runtime, "sh", "-c", script, options={"pids_limit": 10})
    async with asyncio.timeout(20):
        async with runtime.logs(K1, LogQuery(follow=True)) as log:
            await anext(log.chunks)  # the shell complains
    assert len(runtime._bundles.kernel_processes("k1").members()) <= 10
    spec = plan("sleep", options={"pids_limit": 5000}).spec
    (problem,) = await runtime.validate_spec(spec)
    assert str(problem) == "pids_limit: 5000 exceeds the limit of 4096"


def without_cgroups(folder: Path) -> ProcessRuntime:
    made = process_runtime(folder / "kernels")
    return ProcessRuntime(
        folder / "kernels",
        NODE,
        boot_id(),
        settings=made._settings,
        accounts=made._user_accounts,
        cgroups=None,
    )


async def test_memory_is_limited_and_swap_is_no_way_out(runtime, folder) -> None:
    if not await has_cgroups(runtime):
        return
    eat = "import sys; data = bytearray(200 << 20); sys.stdout.write('no limit')"
    await create(runtime, os.path.realpath("/usr/bin/python3"), "-c", eat)
    async with asyncio.timeout(30):
        await runtime._bundles.kernel_processes("k1").wait_ended()
    ended = await found(runtime)
    assert (ended.ending.exit_code, ended.ending.oom_killed) == (137, True)


@pytest.mark.parametrize("text", ['{"pid": 1', "", None, "link", "folder"])
async def test_an_identity_that_cannot_be_read_takes_no_kernel_away(runtime, folder, text) -> None:
    created = await create(runtime, "sleep", "1000")
    path = bundle(folder) / "identity.json"
    path.unlink()
    if text == "link":
        path.symlink_to("/etc/passwd")
    elif text == "folder":
        path.mkdir()
    elif text is not None:
        path.write_text(text)
    kernel = await found(runtime)
    assert (kernel.state, kernel.handle) == (ObservedState.RUNNING, created.handle)
    assert not await runtime.remove(K1, unless_alive=True)
    assert Path(f"/proc/{created.handle}").exists()
    await runtime.stop(K1, 0)
    assert not Path(f"/proc/{created.handle}").exists()


async def test_without_a_cgroup_the_shim_is_found_by_its_lock(runtime, folder) -> None:
    runtime = without_cgroups(folder)
    created = await create(runtime, "sh", "-c", "setsid sleep 1000 & sleep 1000")
    (bundle(folder) / "identity.json").write_text("{")
    kernel = await found(runtime)
    assert (kernel.state, kernel.handle) == (ObservedState.RUNNING, created.handle)
    await runtime.stop(K1, 0)
    assert (await found(runtime)).state is ObservedState.EXITED


async def test_a_bundle_of_another_node_is_not_touched(runtime, folder) -> None:
    bundle(folder).mkdir(mode=0o700)
    (bundle(folder) / "record.json").write_text(plan("sleep", node="node-b").record)
    with pytest.raises(KernelConflict):
        await create(runtime, "sleep", "1000")
    assert (bundle(folder) / "record.json").exists()
    listing = await runtime.list_kernels()
    assert (listing.kernels, listing.leftovers) == ((), (Leftover("k1", "folder k1"),))


async def test_daemon_without_a_name_runs_kernels(runtime, monkeypatch) -> None:
    """The user of a container need not be in its /etc/passwd."""

    def fails(uid: int) -> object:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", fails)
    runtime.update_accounts(UserAccounts())
    assert await runtime.validate_spec(plan("true").spec) == []
    me = str(os.geteuid())
    assert await runtime.validate_spec(plan("true", user=me).spec) == []
    (problem,) = await runtime.validate_spec(plan("true", user="root").spec)
    assert str(problem) == f"user: kernels of agent-1 run as {me} here"


@pytest.mark.parametrize(
    ("spawning", "error", "why"),
    [
        ("subprocess.run", OSError(errno.EAGAIN, ""), "shim: Resource temporarily"),
        ("subprocess.run", OSError(errno.ENOMEM, ""), "shim: Cannot allocate memory"),
        (
            "threading.Thread.start",
            RuntimeError("can't start new thread"),
            "can't start new thread",
        ),
    ],
    ids=["processes", "memory", "threads"],
)
async def test_shortage_is_unavailable(runtime, monkeypatch, spawning, error, why) -> None:
    monkeypatch.setattr(runtime, "_manager", None)
    with monkeypatch.context() as patch:
        patch.setattr(spawning, Mock(side_effect=error))
        for options in ({}, {"ulimits": {"nproc": {"soft": 999, "hard": 999}}}):
            with pytest.raises(RuntimeUnavailable, match=why):
                await create(runtime, "true", options=options)
    assert await runtime.find(K1) is None
    await create(runtime, "sleep", "1000")


async def test_kernel_with_a_stopped_shim_can_be_removed(runtime, folder):
    await create(runtime, "sleep", "1000")
    shim(folder).signal(signal.SIGSTOP)
    async with asyncio.timeout(30):
        await runtime.remove(K1)
    assert await runtime.find(K1) is None


async def assert_end_is_told(events, folder) -> None:
    command(folder).signal(signal.SIGKILL)
    async with asyncio.timeout(20):
        assert await anext(events) == "k1"
    await events.aclose()


async def test_live_kernel_set_aside_is_restored(runtime, folder) -> None:
    """A daemon died between setting a bundle aside and looking whether its kernel lives."""
    created = await create(runtime, "sleep", "1000")
    bundle(folder).rename(folder / "kernels" / ".removed-k1")
    after = process_runtime(folder / "kernels")
    events = after.watch_events()
    assert await anext(events) == ""
    kernel = await found(after)
    assert (kernel.state, kernel.handle, kernel.record) == (
        ObservedState.RUNNING,
        created.handle,
        created.record,
    )
    await assert_end_is_told(events, folder)
    await after.close()


async def test_the_end_of_a_kernel_that_was_found_later_is_told(runtime, folder) -> None:
    after = process_runtime(folder / "kernels")
    events = after.watch_events()
    assert await anext(events) == ""
    await create(runtime, "sleep", "1000")
    assert (await found(after)).state is ObservedState.RUNNING
    await assert_end_is_told(events, folder)
    await after.close()
