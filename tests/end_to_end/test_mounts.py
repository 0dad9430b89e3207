"""Folders of the node in containers: only what is allowed, and only what was looked at."""

import asyncio
import subprocess
from collections import Counter
from pathlib import Path

from agentd.host.lookups import MAX_AT_ONCE
from end_to_end.containers import MOUNTABLE, printed
from support.daemon import AGENTS, Daemon
from support.daemon_pool import Serving
from support.engine import Engine
from support.engine_proxy import EngineProxy
from support.host_faults import hung_mount
from support.needs import require
from support.waiting import until


async def test_mounts_are_read_only_below_allowed_folders(
    serving_docker: Serving, folder: Path
) -> None:
    data = folder / "data"
    data.mkdir()
    (data / "file").write_text("hello\n")
    (folder / "data2").mkdir()
    (data / "out").symlink_to(folder / "data2")
    dockered = await serving_docker(MOUNTABLE.format(folder=folder) + AGENTS)
    mount = {"source": str(data), "target": "/data"}
    assert "hello" in await printed(dockered, "cat /data/file", mounts=[mount])
    script = "touch /data/new 2>&1; echo more >> /data/file 2>&1; true"
    assert "Read-only" in await printed(dockered, script, mounts=[mount])
    await printed(dockered, "echo more >> /data/file", mounts=[{**mount, "read_only": False}])
    assert (data / "file").read_text() == "hello\nmore\n"
    for source in (f"{data}/../data2", f"{data}/out", f"{folder}/data2", "/"):
        answer = await dockered.create(mounts=[{"source": source, "target": "/data"}])
        assert "is not below an allowed folder" in answer.json["detail"], source
    answer = await dockered.create(mounts=[{"source": f"{data}/none", "target": "/data"}])
    assert "does not exist" in answer.json["detail"]


async def test_a_kernel_shows_its_mounts_as_they_were_sent(dockered, folder: Path) -> None:
    (folder / "data").mkdir()
    await dockered.start(MOUNTABLE.format(folder=folder) + AGENTS)
    mounts = [
        {"source": str(folder / "data"), "target": "/data", "read_only": False},
        {"source": f"{folder}/data/../data", "target": "/again", "read_only": True},
    ]
    made = await dockered.running(kernel_id="k1", mounts=mounts)
    assert made["mounts"] == mounts
    await dockered.restart()
    assert (await dockered.get("/v1/kernels/k1"))["mounts"] == mounts


async def test_link_exchanged_during_a_create_is_not_followed(
    proxied: tuple[Daemon, EngineProxy], engine: Engine, folder: Path
) -> None:
    """Two links to one file, so that the file is there whichever of them is exchanged."""
    daemon, proxy = proxied
    data = folder / "data"
    data.mkdir()
    (data / "f1").write_text("mine")
    (data / "f2").hardlink_to(data / "f1")
    (folder / "secret").write_text("secret")

    def exchange(_: dict) -> None:
        (data / "f2").unlink()
        (data / "f2").symlink_to(folder / "secret")

    await daemon.start(MOUNTABLE.format(folder=folder) + AGENTS)
    for command in (["sleep", "100"], ["cat", "/b"]):
        proxy.rule("POST .*/containers/create", proxy.change(exchange))
        answer = await daemon.create(
            command=command,
            mounts=[
                {"source": str(data / "f1"), "target": "/a"},
                {"source": str(data / "f2"), "target": "/b"},
            ],
        )
        assert (answer.status, answer.json["code"]) == (502, "RuntimeFailure"), command
        assert "was replaced during the create" in answer.json["detail"]
        assert engine.containers() == []
        (data / "f2").unlink()
        (data / "f2").hardlink_to(data / "f1")


async def test_submounts_of_read_only_mounts_are_read_only(dockered: Daemon, folder: Path) -> None:
    below = folder / "data" / "below"
    below.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", below], check=True)
    try:
        await dockered.start(MOUNTABLE.format(folder=folder) + AGENTS)
        mount = {"source": str(folder / "data"), "target": "/d"}
        await printed(dockered, "touch /d/below/x; true", mounts=[mount])
        assert not (below / "x").exists()
    finally:
        subprocess.run(["umount", below], check=True)


async def test_unresponsive_mount_delays_no_other_request(dockered: Daemon, folder: Path) -> None:
    require("fuse")
    dead = folder / "data" / "dead"
    dead.mkdir(parents=True)
    dockered.deadlines = {"agentd.host.lookups.ANSWER_TIMEOUT_S": 0.5}
    await dockered.start(MOUNTABLE.format(folder=folder) + AGENTS)
    with hung_mount(dead):
        mounts = [{"source": f"{dead}/x", "target": "/data"}]
        creates = [asyncio.create_task(dockered.create(mounts=mounts)) for _ in range(6)]
        await asyncio.sleep(0)
        assert (await dockered.running(kernel_id="beside"))["state"] == "running"
        answers = await asyncio.gather(*creates)
        assert {(a.status, a.json["code"]) for a in answers} == {(503, "RuntimeUnavailable")}
        assert Counter(a.json["detail"] for a in answers) == {
            "a mount's source does not answer within 0.5 s": MAX_AT_ONCE,
            "earlier lookups do not answer: a mount's source": 6 - MAX_AT_ONCE,
        }
        assert [k["kernel_id"] for k in await dockered.get("/v1/kernels")] == ["beside"]
        assert await dockered.stop() == 0, "no thread holds up the end"
    await dockered.start()
    assert (await dockered.create(mounts=[{"source": str(dead), "target": "/data"}])).status == 201


async def test_kernel_whose_mount_has_died_is_served_after_a_restart(
    dockered: Daemon, folder: Path
) -> None:
    """No start waits for a dead NFS server."""
    require("fuse")
    dead = folder / "data" / "dead"
    dead.mkdir(parents=True)
    await dockered.start(MOUNTABLE.format(folder=folder) + AGENTS)
    await dockered.running(kernel_id="k1", mounts=[{"source": str(dead), "target": "/data"}])
    with hung_mount(dead), hung_mount(folder / "data"):
        await dockered.restart()
        assert [k["state"] for k in await dockered.get("/v1/kernels")] == ["running"]
        assert (await dockered.call("POST", "/v1/reload")).status == 200
        await until(dockered.warnings, lambda texts: f"{folder}/data does not answer" in texts)
        assert (await dockered.call("GET", "/v1/stats")).status == 200
        assert (await dockered.call("POST", "/v1/kernels/k1/stop", {"timeout": 0})).status == 200
        assert (await dockered.call("DELETE", "/v1/kernels/k1")).status == 204
