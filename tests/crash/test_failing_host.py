"""A state folder that fails, and a machine that runs out or is set wrong."""

import asyncio
import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from agentd.runtimes.process.shim import PR_SET_CHILD_SUBREAPER
from native.libraries import built
from support.checked_node import NODE, ONE, CheckedNode, session_id, start_time
from support.daemon import Daemon
from support.waiting import until

ROOT_ONLY = pytest.mark.needs("root")
pytestmark = pytest.mark.started


@contextmanager
def mounted(*arguments: str, at: Path) -> Iterator[None]:
    subprocess.run(["mount", *arguments, str(at)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


async def is_served_without_being_remembered(node: CheckedNode) -> None:
    """Operations without a state change work; the others are refused and leave nothing."""
    daemon = node.daemon
    before = await node.snapshot()
    refused = await daemon.create(kernel_id="k2", slots=ONE)
    assert (refused.status, refused.json["code"]) == (503, "StateUnavailable"), refused.content
    assert "cannot be written" in refused.json["detail"]
    drained = await daemon.call("POST", "/v1/devices/cuda/cuda9/drain")
    assert (drained.status, drained.json["code"]) == (503, "StateUnavailable")
    assert (await daemon.device("cuda9"))["state"] == "ok"
    assert (await daemon.call("GET", "/v1/kernels/k1/logs")).status == 200
    stopped = await daemon.call("POST", "/v1/kernels/k0/stop", {"timeout": 0})
    assert (stopped.status, stopped.json["state"]) == (200, "terminated")
    after = await node.snapshot()
    assert after.recorded.keys() == before.recorded.keys()


@ROOT_ONLY
async def test_daemon_serves_with_a_read_only_state_folder(node: CheckedNode) -> None:
    daemon = node.daemon
    for name in ("k0", "k1"):
        await daemon.running(kernel_id=name, slots=ONE)
    before, lives = await node.check(), node.live_commands()
    await node.kill()
    state = daemon.folder / "state"
    with mounted("--bind", str(state), at=state):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(state)], check=True)
        await node.start()
        assert node.live_commands() == lives
        warnings = await daemon.warnings()
        assert [w for w in warnings if "the inventory is not saved" in w], warnings
        await is_served_without_being_remembered(node)
        assert await node.kill(signal.SIGTERM) == 0
    await node.start()
    assert (await daemon.get("/v1/kernels/k0"))["state"] == "terminated"
    await node.check(before, {"k0"})
    assert (await daemon.create(kernel_id="k2", slots=ONE)).status == 201


@ROOT_ONLY
async def test_full_state_folder_recovers_when_there_is_room(folder: Path) -> None:
    node, state = CheckedNode(Daemon(folder, "process")), folder / "state"
    daemon = node.daemon
    state.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=512k,mode=711", "none", at=state):
        await node.start(text=NODE)
        for name in ("k0", "k1"):
            await daemon.running(kernel_id=name, slots=ONE)
        fill(state / "filler")
        await is_served_without_being_remembered(node)
        lives = node.live_commands()
        await node.kill()
        await node.start()
        assert node.live_commands() == lives
        assert (await daemon.create(kernel_id="k2", slots=ONE)).status == 503
        (state / "filler").unlink()
        assert (await daemon.create(kernel_id="k2", slots=ONE)).status == 201
        drained = await daemon.call("POST", "/v1/devices/cuda/cuda9/drain")
        assert drained.json["state"] == "drained"
        await until(daemon.warnings, lambda them: not any("not saved" in w for w in them))
        await node.check()
        await daemon.close()


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(b"x" * 4096)


@pytest.mark.needs("cgroups")
async def test_a_state_folder_that_is_gone_costs_no_kernel(node: CheckedNode) -> None:
    daemon, state = node.daemon, node.daemon.folder / "state"
    for agent in ("agent-1", "agent-2"):
        await daemon.running(agent, kernel_id=f"k-{agent}", slots=ONE)
    lives = node.live_commands()
    shutil.rmtree(state)
    assert (await daemon.create(kernel_id="k3", slots=ONE)).status == 201
    await node.check(allowed=["stray"])  # records are rewritten on the next event
    shutil.rmtree(state)
    await node.kill()
    await node.start()
    assert {k: v for k, v in node.live_commands().items() if k != "k3"} == lives
    census = await node.check()
    assert census.recorded.keys() == {"k-agent-1", "k-agent-2", "k3"}
    assert {k: h for k, h in census.holdings.items() if k.startswith("cuda")} == {
        f"cuda/cuda{n}/cuda.device": {kernel_id: 10**6}
        for n, kernel_id in enumerate(("k-agent-1", "k-agent-2", "k3"))
    }
    for kernel_id in census.recorded:
        assert (await node.remove(kernel_id)).status == 204
    await node.check()
    assert node.live_commands() == {}


async def test_a_clock_that_is_set_back_moves_no_deadline(node: CheckedNode) -> None:
    daemon = node.daemon
    await daemon.running(kernel_id="k1", slots=ONE)
    before, lives = await node.check(), node.live_commands()
    await node.kill()
    (daemon.folder / "state" / "intents" / "k2.json").write_text("{")
    offset = daemon.folder / "offset"
    offset.write_text("0")
    library = built("clock.c", daemon.folder / "clock.so")
    await daemon.start(LD_PRELOAD=str(library), CLOCK_OFFSET=str(offset))
    assert await daemon.kernel_ids() == {"k1", "k2"}
    offset.write_text("-86400")
    await until(daemon.kernel_ids, {"k1"})
    assert node.live_commands() == lives
    young = await daemon.running(kernel_id="k3", slots=ONE)
    old = await daemon.get("/v1/kernels/k1")
    assert young["created_at"] < old["created_at"], "the clock was set back for the daemon"
    await node.check(before)
    assert (await node.remove("k3")).status == 204


@contextmanager
def few_descriptors(pid: int) -> Iterator[None]:
    """Lower a process's limit of descriptors, so that it cannot open any more."""
    usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
    free = next(number for number in range(len(used) + 1) if number not in used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, usual[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)


async def test_kernel_survives_exhausted_descriptors(node: CheckedNode) -> None:
    daemon = node.daemon
    for name in ("k1", "k2"):
        await daemon.running(kernel_id=name, slots=ONE)
    before, lives = await node.check(), node.live_commands()
    assert daemon.process is not None
    with few_descriptors(daemon.process.pid):
        os.kill(lives["k2"][0], signal.SIGKILL)
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(2):
                await daemon.create(kernel_id="k3", slots=ONE)
    await daemon.until("k2", "terminated")
    await node.check(before, {"k2", "k3"})
    assert node.live_commands()["k1"] == lives["k1"]
    assert daemon.process.poll() is None


@ROOT_ONLY
async def test_reused_pid_is_another_process(process_node: CheckedNode) -> None:
    node, daemon = process_node, process_node.daemon
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    kernel = await daemon.running(kernel_id="k1", slots=ONE)
    await node.kill()
    identity = daemon.folder / "state" / "kernels" / "k1" / "identity.json"
    shim = json.loads(identity.read_text())["shim_pid"]
    for pid in (shim, kernel["pid"]):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    other = reincarnated(kernel["pid"])
    try:
        await node.start()
        after = await daemon.get("/v1/kernels/k1")
        assert (after["state"], after["exit_code"]) == ("terminated", None)
        assert await daemon.free("cuda.device") == "32"
        assert (await node.remove("k1")).status == 204
        assert other.poll() is None
        await node.check()
    finally:
        other.kill()
        other.wait()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def reincarnated(pid: int) -> subprocess.Popen[bytes]:
    """Start a process that leads a session under this very pid."""
    for _ in range(200):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        made = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        if made.pid == pid:
            assert session_id(pid) == pid
            assert start_time(pid)
            return made
        made.kill()
        made.wait()
    raise AssertionError(f"pid {pid} could not be had again")
