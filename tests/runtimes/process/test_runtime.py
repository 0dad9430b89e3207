"""What only the process runtime has: keepers, sessions, identities."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentd.core.plan import kernel_name
from agentd.core.reconcile import FoundState
from agentd.errors import KernelConflict
from agentd.host.cgroups import MemoryGroups, find_memory_groups
from agentd.host.probe import boot_id
from agentd.host.processes import Proc, read_stat
from agentd.runtimes.process.output import tail_offset
from agentd.runtimes.process.proof import recovered
from agentd.runtimes.process.runtime import ProcessRuntime
from agentd.services.interfaces import LogQuery
from contracts.test_runtime import NODE, plan
from native.libraries import built

pytestmark = pytest.mark.xdist_group("runtimes")  # one node id, so one at a time


@pytest.fixture(params=["cgroup", "no cgroup"])
def groups(request, folder: Path) -> MemoryGroups | None:
    (folder / "kernels").mkdir()
    return find_memory_groups() if request.param == "cgroup" else None


@pytest.fixture
async def runtime(folder: Path) -> AsyncIterator[ProcessRuntime]:
    made = runtime_in(folder)
    yield made
    for found in await made.list():
        await made.remove(found.kernel_id, found.handle)
    await made.close()


def runtime_in(folder: Path, boot: str | None = None) -> ProcessRuntime:
    kernels = folder / "kernels"
    kernels.mkdir(exist_ok=True)
    return ProcessRuntime(kernels, NODE, "nobody", boot or boot_id(), find_memory_groups())


async def create(runtime: ProcessRuntime, *command: str):
    return await runtime.create(plan(*command), lambda _: None)


def identity(folder: Path) -> dict:
    return json.loads((folder / "kernels" / "k1" / "identity.json").read_text())


async def without_keeper(folder: Path) -> Proc:
    """Kill the kernel's keeper; return its command."""
    who = identity(folder)
    keeper = Proc(who["keeper_pid"], who["keeper_start_time"])
    keeper.signal(signal.SIGKILL)
    await keeper.ended()
    return Proc(who["pid"], who["start_time"])


def has_groups(runtime: ProcessRuntime) -> bool:
    """Whether kernels get a cgroup; where they do not, that is told."""
    is_there = find_memory_groups() is not None
    assert is_there or "mem" in runtime.unenforced(plan("sleep").spec)
    return is_there


async def test_who_a_kernel_is_stands_on_disk_and_in_its_environment(runtime, folder) -> None:
    found = await create(runtime, "sleep", "1000")
    who = identity(folder)
    assert who["pid"] == int(found.handle)
    assert who["boot_id"] == boot_id()
    stat = read_stat(who["pid"])
    assert stat is not None
    assert (stat.start_time, stat.session) == (who["start_time"], who["pid"])
    env = Path(f"/proc/{who['pid']}/environ").read_bytes().split(b"\0")
    for wanted in (f"AGENTD_NODE={NODE}".encode(), b"AGENTD_KERNEL=k1", b"AGENTD_AGENT=agent-1"):
        assert wanted in env
    assert any(item.startswith(b"AGENTD_DEVICES=cpu/") for item in env)
    assert not any(item.startswith(b"HOME=/root") for item in env)
    if os.geteuid() == 0:
        status = Path(f"/proc/{who['pid']}/status").read_text()
        assert "Uid:\t65534\t65534\t65534\t65534" in status
        assert "NoNewPrivs:\t1" in status


async def test_a_kernel_has_ended_only_when_nothing_of_it_is_left(runtime, folder) -> None:
    await create(runtime, "sh", "-c", "setsid sleep 1000 & sleep 1000 & exit 5")
    leader = Proc(identity(folder)["pid"], identity(folder)["start_time"])
    await leader.ended()
    found = await runtime.find("k1")
    assert found is not None
    assert found.state is FoundState.RUNNING
    await runtime.stop("k1", found.handle, 0)
    ended = await runtime.find("k1")
    assert ended is not None
    assert (ended.state, ended.ending.exit_code) == (FoundState.EXITED, 5)


async def test_one_that_ignores_term_is_killed_after_its_grace(runtime) -> None:
    found = await create(runtime, "sh", "-c", "trap '' TERM; echo ready; sleep 1000; sleep 1000")
    assert await anext(runtime.logs("k1", found.handle, LogQuery(follow=True))) == b"ready\n"
    await runtime.stop("k1", found.handle, 0.2)
    ended = await runtime.find("k1")
    assert ended is not None
    assert ended.ending.exit_code == 137


async def test_a_killed_keeper_loses_the_exit_status_and_not_the_kernel(runtime, folder) -> None:
    await create(runtime, "sleep", "1000")
    command = await without_keeper(folder)
    found = await runtime.find("k1")
    assert found is not None
    assert found.state is FoundState.RUNNING
    command.signal(signal.SIGKILL)
    async with asyncio.timeout(10):
        async for seen in runtime.follow():
            if seen == "k1" or (await runtime.find("k1")).state is FoundState.EXITED:
                break
    ended = await runtime.find("k1")
    assert ended is not None
    assert (ended.state, ended.ending.exit_code) == (FoundState.EXITED, None)
    assert "exit status is lost" in ended.ending.reason


async def test_what_forgot_whose_it_is_and_has_no_keeper_is_known_by_its_group(
    runtime, folder
) -> None:
    if not has_groups(runtime):
        return
    await create(runtime, "sh", "-c", "env -i setsid sleep 1000 & exit")
    who = identity(folder)
    await Proc(who["pid"], who["start_time"]).ended()
    await without_keeper(folder)
    found = await runtime_in(folder).find("k1")
    assert found is not None
    assert found.state is FoundState.RUNNING
    await runtime.stop("k1", found.handle, 0)
    assert (await runtime.find("k1")).state is FoundState.EXITED


async def test_a_kernel_that_forks_and_exits_without_pause_is_ended(folder, groups) -> None:
    runtime = ProcessRuntime(folder / "kernels", NODE, "nobody", boot_id(), groups)
    found = await create(runtime, str(built("chain.c", folder / "chain")))
    async with asyncio.timeout(5):
        await runtime.stop("k1", found.handle, 0.3)
    assert (await runtime.find("k1")).state is FoundState.EXITED
    await runtime.remove("k1", found.handle)
    await runtime.close()


@pytest.mark.parametrize("program", [("chain.c", "2000"), ("headless.c",)])
async def test_a_group_with_somebody_in_it_is_a_kernel_that_lives(runtime, folder, program) -> None:
    """Whoever is in it has moved on, or looks like a zombie, and there is no keeper to ask."""
    if not has_groups(runtime):
        return
    found = await create(runtime, str(built(program[0], folder / "program")), *program[1:])
    await without_keeper(folder)
    for _ in range(20):
        assert (await runtime_in(folder).find("k1")).state is FoundState.RUNNING
    async with asyncio.timeout(10):
        await runtime.stop("k1", found.handle, 0)
    assert (await runtime.find("k1")).state is FoundState.EXITED
    await runtime.remove("k1", found.handle)
    assert not find_memory_groups().group(kernel_name(NODE, "k1")).folder.exists()


async def test_a_pid_of_another_boot_is_nobody(runtime, folder) -> None:
    await create(runtime, "sleep", "1000")
    await runtime.stop("k1", "", 0)
    path = folder / "kernels" / "k1"
    (path / "exit.json").unlink()
    stat = read_stat(os.getpid())
    assert stat is not None
    me = {"pid": stat.pid, "keeper_pid": stat.pid}
    me |= {"start_time": stat.start_time, "keeper_start_time": stat.start_time}
    (path / "identity.json").write_text(json.dumps(identity(folder) | me))
    after = runtime_in(folder, "another-boot")
    found = await after.find("k1")
    assert found is not None
    assert found.state is FoundState.EXITED
    assert "the node restarted" in found.ending.reason
    await after.remove("k1", found.handle)


async def test_a_pid_that_was_used_again_is_somebody_else(runtime, folder) -> None:
    await create(runtime, "sleep", "1000")
    await runtime.stop("k1", "", 0)
    path = folder / "kernels" / "k1"
    (path / "exit.json").unlink()
    stat = read_stat(os.getpid())
    assert stat is not None
    forged = {**identity(folder), "pid": os.getpid(), "keeper_pid": os.getpid()}
    (path / "identity.json").write_text(json.dumps(forged))
    assert (await runtime.find("k1")).state is FoundState.EXITED
    await runtime.stop("k1", "", 0)
    await runtime.remove("k1", "")


async def test_a_folder_without_identity_never_ran(runtime, folder) -> None:
    (folder / "kernels" / "k1").mkdir()
    (folder / "kernels" / "k1" / "record.json").write_text(plan("sleep").record)
    found = await runtime.find("k1")
    assert found is not None
    assert found.state is FoundState.CREATED
    await runtime.remove("k1", "")
    assert await runtime.list() == []


async def test_the_kernel_s_memory_group_is_removed_with_it(runtime, folder) -> None:
    if not has_groups(runtime):
        return
    await create(runtime, "sleep", "1000")
    group = find_memory_groups().group(kernel_name(NODE, "k1")).folder
    assert str(identity(folder)["pid"]) in (group / "cgroup.procs").read_text().split()
    await runtime.remove("k1", "")
    assert not group.exists()


@pytest.mark.parametrize("text", ['{"pid": 1', "", None])
async def test_an_identity_that_cannot_be_read_is_recovered_from_the_kernel(
    runtime, folder, text
) -> None:
    created = await create(runtime, "sleep", "1000")
    path = folder / "kernels" / "k1" / "identity.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
    found = await runtime.find("k1")
    assert found is not None
    assert (found.state, found.handle) == (FoundState.RUNNING, created.handle)
    assert not await runtime.discard("k1", "")
    assert Path(f"/proc/{created.handle}").exists()
    await runtime.stop("k1", "", 0)
    assert not Path(f"/proc/{created.handle}").exists()


async def test_a_folder_that_is_not_ours_is_not_touched(runtime, folder) -> None:
    theirs = folder / "kernels" / "k1"
    theirs.mkdir()
    (theirs / "record.json").write_text(plan("sleep", node="node-b").record)
    with pytest.raises(KernelConflict):
        await create(runtime, "sleep", "1000")
    assert (theirs / "record.json").exists()


async def test_cancelling_a_create_leaves_nothing(runtime, folder) -> None:
    creating = asyncio.create_task(create(runtime, "sleep", "1000"))
    while not (folder / "kernels" / "k1").exists():
        await asyncio.sleep(0)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert list((folder / "kernels").iterdir()) == []
    assert recovered({"AGENTD_NODE": NODE, "AGENTD_KERNEL": "k1"}, "") is None


@pytest.mark.parametrize("lines", [0, 1, 2, 3, 5000, 99999])
def test_the_last_lines_are_found_from_the_end(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "log"
    content = b"".join(b"%d %s\n" % (n, b"x" * (n % 90)) for n in range(6000)) + b"no newline"
    path.write_bytes(content)
    with path.open("rb") as file:
        file.seek(tail_offset(file, lines))
        assert file.read() == b"".join(content.splitlines(keepends=True)[6001 - lines :][-lines:]
                                       if lines else [])  # fmt: skip
