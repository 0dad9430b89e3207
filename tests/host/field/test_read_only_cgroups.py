"""Cgroups that are read-only, or hidden, after a restart of agentd: `ProtectControlGroups=`."""

import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentd.client import AsyncClient
from agentd.core.kernel.plan import kernel_name
from agentd.host.cgroups.hierarchies import find_cgroups
from agentd.host.processes import Proc, read_stat
from support.daemon import AGENTS, Daemon, gpus
from support.waiting import until

pytestmark = pytest.mark.needs("root", "cgroups")
PREPARED = """
import ctypes, runpy
libc = ctypes.CDLL(None)
assert libc.unshare(0x20000) == 0
assert libc.mount(b"none", b"/", None, 0x44000, None) == 0
{mount}
runpy.run_module("agentd", run_name="__main__", alter_sys=True)
"""
READ_ONLY = """
for line in open("/proc/self/mountinfo", "rb").readlines():
    if (point := line.split()[4]).startswith(b"/sys/fs/cgroup"):
        assert libc.mount(b"none", point, None, 0x1021, None) == 0
"""
"""A remount of each hierarchy as it is, but for MS_RDONLY."""
HIDDEN = 'assert libc.mount(b"none", b"/sys/fs/cgroup", b"tmpfs", 1, None) == 0'
FORKS = "sleep 1000 & echo $!; exec sleep 1001"
"""A command whose child outlives it."""
NO_LIMITS = "new kernels have no limits of memory and pids"


@pytest.fixture
async def daemon(folder: Path) -> AsyncIterator[Daemon]:
    made = Daemon(folder, "process")
    yield made
    await made.close()


async def create_forking(daemon: Daemon) -> Proc:
    """Start k1 on a GPU, and return the process that its command has forked."""
    await daemon.start(AGENTS + gpus())
    await daemon.running(kernel_id="k1", slots={"cuda.device": 1}, command=["sh", "-c", FORKS])
    log = await until(lambda: daemon.call("GET", "/v1/kernels/k1/logs"), lambda it: it.content)
    stat = read_stat(int(log.content))
    assert stat is not None
    return Proc(stat.pid, stat.start_time)


async def restart(daemon: Daemon, mount: str, *killed: str) -> dict[str, Any]:
    """Start agentd again after a mount, with these processes of k1 killed; return the kernel."""
    await daemon.stop()
    identity = json.loads((daemon.folder / "state/kernels/k1/identity.json").read_text())
    for name in killed:
        os.kill(identity[name], signal.SIGKILL)
    daemon.program = ("-c", PREPARED.format(mount=mount))
    await daemon.start()
    return await daemon.get("/v1/kernels/k1")


async def test_members_of_a_read_only_group_hold_devices(daemon: Daemon) -> None:
    child = await create_forking(daemon)
    kernel = await restart(daemon, READ_ONLY, "shim_pid", "pid")
    assert (kernel["state"], child.is_alive()) == ("running", True)
    assert await daemon.free("cuda.device") == "1"
    stopped = await daemon.call("POST", "/v1/kernels/k1/stop", {"timeout": 0})
    assert (stopped.json["state"], child.is_alive()) == ("terminated", False)
    assert await daemon.free("cuda.device") == "2"


async def test_new_kernels_without_limits_are_a_condition(daemon: Daemon) -> None:
    await create_forking(daemon)
    await restart(daemon, READ_ONLY)
    conditions = (await daemon.get("/v1/node"))["conditions"]
    about = [item["about"] for item in conditions if NO_LIMITS in item["reason"]]
    assert about == ["runtime/process"]
    await daemon.running(kernel_id="k2", slots={"cuda.device": 1})
    missing = (await daemon.get("/v1/kernels/k2"))["not_enforced"]
    assert {"mem", "pids_limit"} <= {*missing}
    async with (
        AsyncClient(str(daemon.folder / "agentd.sock")) as client,
        client.exec("k2", ["true"]) as command,
    ):
        assert [output async for output in command] == []
    assert command.exit_code == 0
    for name in ("k1", "k2"):
        assert (await daemon.call("DELETE", f"/v1/kernels/{name}?timeout=0")).status == 204
    await daemon.stop()
    daemon.program = ("-m", "agentd")
    await daemon.start()
    assert not any(NO_LIMITS in text for text in await daemon.warnings())
    cgroups = find_cgroups()
    assert cgroups is not None
    assert not cgroups.group(kernel_name(daemon.node, "k1")).exists()
    assert await daemon.failed_checks() == []


async def test_command_holds_devices_while_cgroups_are_hidden(daemon: Daemon) -> None:
    await create_forking(daemon)
    assert (await restart(daemon, HIDDEN, "shim_pid"))["state"] == "running"
    assert await daemon.free("cuda.device") == "1"
