"""Bundles that are there and cannot be used: nothing of their kernels is lost or freed."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentd.host.processes import Proc, read_stat
from support.checked_node import CheckedNode
from support.daemon import AGENTS, Answer, Daemon, gpus
from support.waiting import until

WITHOUT_CGROUPS = """
import ctypes, runpy
from agentd.services.kernels import reconciler
reconciler.REOBSERVE_PAUSE_S = 0.2
libc = ctypes.CDLL(None)
assert libc.unshare(0x20000) == 0
assert libc.mount(b"none", b"/", None, 0x44000, None) == 0
assert libc.mount(b"tmpfs", b"/sys/fs/cgroup", b"tmpfs", 1, None) == 0
runpy.run_module("agentd", run_name="__main__", alter_sys=True)
"""
"""The daemon in a mount namespace without cgroups; it often looks at unreadable kernels."""
NOBODY = 65534
STOPS = "trap '' TERM; while :; do sleep 0.05; done"


def kept(folder: Path) -> Path:
    """Return the place of a bundle that was moved."""
    return folder.with_name("moved")


def moved(folder: Path) -> None:
    folder.rename(kept(folder))
    folder.symlink_to(kept(folder))


def moved_back(folder: Path) -> None:
    folder.unlink()
    kept(folder).rename(folder)


DAMAGES: dict[str, tuple[Callable[[Path], object], Callable[[Path], object], str]] = {
    "writable": (lambda f: f.chmod(0o770), lambda f: f.chmod(0o700), "has mode 0770, expected"),
    "other-owner": (
        lambda f: os.chown(f, NOBODY, -1),
        lambda f: os.chown(f, 0, -1),
        "belongs to user 65534, expected 0",
    ),
    "link": (moved, moved_back, "Not a directory"),
}
"""Damage to a bundle, its repair, and the reason."""
CGROUPS = [pytest.param(True, marks=pytest.mark.needs("cgroups")), False]


@pytest.fixture
def node(process_node: CheckedNode) -> Daemon:
    return process_node.daemon


async def started(node: Daemon, *, has_cgroups: bool) -> None:
    if not has_cgroups:
        node.program = ("-c", WITHOUT_CGROUPS)
    else:
        node.deadlines = {"agentd.services.kernels.reconciler.REOBSERVE_PAUSE_S": 0.2}
    await node.start(AGENTS + gpus(2))


async def running(node: Daemon, *command: str) -> Proc:
    """Run k1 on a GPU, and return its process."""
    words = {"command": list(command)} if command else {}
    kernel = await node.running(kernel_id="k1", slots={"cuda.device": 1}, **words)
    stat = read_stat(kernel["pid"])
    assert stat is not None
    return Proc(stat.pid, stat.start_time)


async def restarted(node: Daemon, damage: Callable[[Path], object]) -> dict[str, Any]:
    """Damage the bundle of k1 while agentd is down, and return the kernel as it is afterwards."""
    await node.stop()
    damage(bundle(node))
    await node.start()
    return await node.get("/v1/kernels/k1")


async def stop(node: Daemon, timeout_s: float) -> Answer:
    return await node.call("POST", "/v1/kernels/k1/stop", {"timeout": timeout_s})


def bundle(node: Daemon) -> Path:
    return node.folder / "state" / "kernels" / "k1"


@pytest.mark.needs("root")
@pytest.mark.parametrize("has_cgroups", CGROUPS)
@pytest.mark.parametrize("damage", DAMAGES)
async def test_an_unreadable_kernel_holds_until_mended(
    node: Daemon, damage: str, has_cgroups: bool
) -> None:
    break_, mend, why = DAMAGES[damage]
    await started(node, has_cgroups=has_cgroups)
    process = await running(node)
    before = await node.get("/v1/kernels/k1")
    kernel = await restarted(node, break_)
    assert (kernel["state"], kernel["allocation"]) == ("unreadable", before["allocation"])
    assert why in kernel["reason"]
    assert f"kernel k1: {kernel['reason']}" in await node.warnings()
    assert await node.free("cuda.device") == "1"
    assert (await node.create(slots={"cuda.device": 2})).status == 409
    if not has_cgroups:  # nothing else is known of its processes
        refused = await stop(node, 0)
        assert (refused.status, refused.json["code"]) == (503, "RuntimeUnavailable")
        assert why in refused.json["detail"]
        logs = await node.call("GET", "/v1/kernels/k1/logs")
        assert (logs.status, why in logs.json["detail"]) == (503, True)
        assert (await node.call("DELETE", "/v1/kernels/k1")).status == 503
    assert process.is_alive()
    mend(bundle(node))
    assert await node.until("k1", "running") == before
    stopped = await stop(node, 0)
    assert (stopped.json["exit_code"], process.is_alive()) == (137, False)
    assert await node.free("cuda.device") == "2"


@pytest.mark.needs("root", "cgroups")
async def test_an_unreadable_kernel_ends_by_its_cgroup(node: Daemon) -> None:
    await started(node, has_cgroups=True)
    process = await running(node)
    assert (await restarted(node, lambda f: f.chmod(0o777)))["state"] == "unreadable"
    stopped = await stop(node, 0)
    assert (stopped.status, stopped.json["state"]) == (200, "terminated")
    assert "has mode 0777" in stopped.json["reason"]
    assert not process.is_alive()
    assert (await node.call("DELETE", "/v1/kernels/k1")).status == 204
    assert not bundle(node).exists()


@pytest.mark.parametrize("has_cgroups", CGROUPS)
async def test_a_state_folder_that_others_can_read_is_used(node: Daemon, has_cgroups: bool) -> None:
    await started(node, has_cgroups=has_cgroups)
    await running(node, "sh", "-c", "echo hello; trap 'exit 7' TERM; while :; do sleep 0.05; done")
    await node.stop()
    for path in [bundle(node).parent.parent, *bundle(node).parent.parent.rglob("*")]:
        path.chmod(path.stat().st_mode | (0o050 if path.is_dir() else 0o040))
    await node.start()
    kernel = await node.get("/v1/kernels/k1")
    assert kernel["state"] == "running"
    assert f"{bundle(node)}: has mode 0750, expected 0700" in kernel["reason"]
    assert await node.free("cuda.device") == "1"
    assert (await node.call("GET", "/v1/kernels/k1/logs")).content == b"hello\n"
    stopped = await stop(node, 20)
    assert (stopped.json["state"], stopped.json["exit_code"]) == ("terminated", 7)
    assert await node.free("cuda.device") == "2"


async def test_an_unreadable_record_file_holds_as_known(node: Daemon) -> None:
    await started(node, has_cgroups=False)
    process = await running(node, "sh", "-c", f"echo hello; {STOPS}")
    before = await node.get("/v1/kernels/k1")
    record = bundle(node) / "record.json"
    kernel = await restarted(node, lambda _: moved(record))
    assert (kernel["state"], kernel["allocation"]) == ("unreadable", before["allocation"])
    assert f"{record}: Too many levels of symbolic links" in kernel["reason"]
    assert await node.free("cuda.device") == "1"
    assert kernel["pid"] == process.pid
    assert (await node.call("GET", "/v1/kernels/k1/logs")).content == b"hello\n"
    moved_back(record)
    assert await node.until("k1", "running") == before
    assert process.is_alive()


async def test_damaged_record_beside_a_foreign_file_frees_nothing(node: Daemon) -> None:
    await started(node, has_cgroups=False)
    process = await running(node)
    (bundle(node) / "record.json.bak").touch()
    kernel = await restarted(node, lambda f: (f / "record.json").write_text("{"))
    assert kernel["state"] == "unreadable"
    assert await node.free("cuda.device") == "0"
    assert process.is_alive()


async def test_an_end_under_an_unreadable_lock_is_shown(node: Daemon) -> None:
    await started(node, has_cgroups=False)
    process = await running(node)
    lock = bundle(node) / "lock"
    assert (await restarted(node, lambda _: moved(lock)))["state"] == "running"
    os.kill(process.pid, 9)
    kernel = await node.until("k1", "unreadable")
    assert f"{lock}: Too many levels of symbolic links" in kernel["reason"]
    assert await node.free("cuda.device") == "1"
    moved_back(lock)
    assert (await node.until("k1", "terminated"))["exit_code"] == 137
    assert await node.free("cuda.device") == "2"


@pytest.mark.needs("root")
@pytest.mark.parametrize("has_cgroups", CGROUPS)
@pytest.mark.parametrize("damage", ["removed", *DAMAGES])
async def test_a_kernel_damaged_while_it_runs_can_be_stopped(
    node: Daemon, damage: str, has_cgroups: bool
) -> None:
    await started(node, has_cgroups=has_cgroups)
    process = await running(node, "sh", "-c", STOPS)
    (shutil.rmtree if damage == "removed" else DAMAGES[damage][0])(bundle(node))
    waiting = await stop(node, 0.2)
    assert waiting.status == 200
    assert not process.is_alive()
    assert waiting.json["state"] == ("lost" if damage == "removed" else "terminated")
    assert await node.free("cuda.device") == "2"


@pytest.mark.needs("root")
@pytest.mark.parametrize("has_cgroups", CGROUPS)
async def test_a_kernel_without_its_bundle_holds_until_it_ends(
    node: Daemon, has_cgroups: bool
) -> None:
    await started(node, has_cgroups=has_cgroups)
    process = await running(node)
    shutil.rmtree(bundle(node).parent)
    assert await node.failed_checks() == []
    assert (await node.get("/v1/kernels/k1"))["state"] == "running"
    assert await node.free("cuda.device") == "1"
    assert (await node.create(kernel_id="k2", command=["true"])).status == 201
    os.kill(process.pid, 9)
    await node.until("k1", "lost")
    assert await node.free("cuda.device") == "2"


async def test_child_of_a_killed_shim_holds_the_device(node: Daemon) -> None:
    await started(node, has_cgroups=False)
    script = "setsid sleep 1000 & echo $!"
    await node.create(kernel_id="k1", slots={"cuda.device": 1}, command=["sh", "-c", script])
    child = int(await until(bundle(node).joinpath("output.log.0").read_text))
    await until((bundle(node) / "descendants.json").exists)
    await node.stop()
    os.kill(json.loads((bundle(node) / "identity.json").read_text())["shim_pid"], 9)
    await node.start()
    assert (await node.get("/v1/kernels/k1"))["state"] == "running"
    assert await node.free("cuda.device") == "1"
    os.kill(child, 9)
    assert "its shim was killed" in (await node.until("k1", "terminated"))["reason"]
    assert await node.free("cuda.device") == "2"


@pytest.mark.parametrize("has_cgroups", CGROUPS)
async def test_a_bundle_removed_after_the_end_is_gone(node: Daemon, has_cgroups: bool) -> None:
    await started(node, has_cgroups=has_cgroups)
    await node.create(kernel_id="k1", slots={"cuda.device": 1}, command=["true"])
    await node.until("k1", "terminated")
    assert (await restarted(node, shutil.rmtree))["state"] == "lost"
    assert await node.free("cuda.device") == "2"
