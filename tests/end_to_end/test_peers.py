"""Daemons on one machine that find the same devices: files that anybody's glob finds."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from daemon import Daemon
from needs import require

AGENT = '[[agents]]\nid = "agent-1"\n'


class Two:
    """Two daemons of root, each with a node id of its own, and one folder of device files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for number in range(2):
            os.mknod(folder / f"acc{number}", 0o666 | 0o020000, os.makedev(1, 3))
        self.table = f'[plugins.acc]\nplugin = "generic"\ndevices = ["{folder}/acc*"]\n'
        self.one, self.two = self._daemon("one"), self._daemon("two")

    def _daemon(self, name: str) -> Daemon:
        (self.folder / name).mkdir()
        made = Daemon(self.folder / name, "process")
        made.node = f"{self.folder.name}-{name}"
        made.deadlines = {"agentd.services.kernels.reconciler.PEERS_PAUSE_S": 0.2}
        return made

    async def start(self, daemon: Daemon) -> None:
        await daemon.start(AGENT + self.table)

    async def close(self) -> None:
        for daemon in (self.one, self.two):
            if daemon.config_file.exists():
                await daemon.close()
            Path(f"/run/agentd/served/{daemon.node}.json").unlink(missing_ok=True)


@pytest.fixture
async def two(folder: Path) -> AsyncIterator[Two]:
    require("root")  # device files are made by it
    made = Two(folder)
    yield made
    await made.close()


async def states(daemon: Daemon) -> list[str]:
    found = await daemon.get("/v1/devices")
    return [device["state"] for device in found if device["device_name"] == "acc"]


async def become(daemon: Daemon, expected: list[str]) -> None:
    async with asyncio.timeout(15):
        while await states(daemon) != expected:
            await asyncio.sleep(0.05)


async def test_the_second_daemon_withholds_what_the_first_serves(two: Two) -> None:
    await two.start(two.one)
    await two.start(two.two)
    assert await states(two.one) == ["ok", "ok"]
    assert await states(two.two) == ["withheld", "withheld"]
    warnings = (await two.two.get("/v1/node"))["warnings"]
    (warning,) = [line for line in warnings if f"served by agentd {two.one.node} (root" in line]
    assert warning.startswith("2 devices of ")
    assert (await two.two.get("/v1/agents/agent-1"))["slots"]["acc.device"]["capacity"] == "0"
    answer = await two.two.create(slots={"acc.device": 1})
    assert (answer.status, answer.json["code"]) == (409, "InsufficientResource")
    assert "withheld: served by agentd" in answer.content.decode()
    await two.one.running(slots={"acc.device": 2})


async def test_stopped_daemon_releases_devices_without_holder(two: Two) -> None:
    await two.start(two.one)
    await two.one.running(slots={"acc.device": 1}, kernel_id="k1")
    await two.start(two.two)
    await two.one.stop()
    await become(two.two, ["withheld", "ok"])
    async with asyncio.timeout(20):
        while not any(
            "held by kernels of agentd" in line
            for line in (await two.two.get("/v1/node"))["warnings"]
        ):
            await asyncio.sleep(0.05)
    await two.start(two.one)
    assert await states(two.one) == ["held", "withheld"] or await states(two.one) == [
        "ok",
        "withheld",
    ]
    await two.one.call("DELETE", "/v1/kernels/k1?timeout=0")
    await two.one.stop()
    await become(two.two, ["ok", "ok"])


@pytest.mark.parametrize("holds", [True, False])
async def test_killed_daemon_keeps_its_kernels_devices(two: Two, holds: bool) -> None:
    await two.start(two.one)
    if holds:
        await two.one.running(slots={"acc.device": 2}, kernel_id="k1")
    await two.one.stop(signal.SIGKILL)
    await two.start(two.two)
    assert await states(two.two) == (["withheld"] * 2 if holds else ["ok"] * 2)


async def test_the_same_node_takes_up_what_it_served(two: Two) -> None:
    await two.start(two.one)
    await two.one.running(slots={"acc.device": 1}, kernel_id="k1")
    await two.one.restart(number=signal.SIGKILL)
    assert "withheld" not in await states(two.one)
    await two.one.running(slots={"acc.device": 1}, kernel_id="k2")


async def test_a_device_that_was_gone_is_given_by_one_daemon_alone(two: Two) -> None:
    """It is back for both at once, and each is asked for it before the other looks."""
    two.table = two.table.replace(
        "[plugins.acc]", "[plugins]\nhealth-interval = 0.1\n[plugins.acc]"
    )
    await two.start(two.one)
    await two.start(two.two)
    for _ in range(3):
        (two.folder / "acc0").unlink()
        for daemon in (two.one, two.two):
            await become(daemon, ["gone", "ok" if daemon is two.one else "withheld"])
        os.mknod(two.folder / "acc0", 0o666 | 0o020000, os.makedev(1, 3))
        body = {"slots": {"acc.device": 1}, "devices": {"acc": ["acc0"]}, "kernel_id": "k"}
        given = set()
        async with asyncio.timeout(10):
            while not given:
                for daemon in (two.one, two.two):
                    if (await daemon.create(**body)).status == 201:
                        given.add(daemon.node)
        assert len(given) == 1
        for daemon in (two.one, two.two):
            await daemon.call("DELETE", "/v1/kernels/k?timeout=0")


async def test_simulated_devices_never_meet(folder: Path) -> None:
    nodes = []
    for name in ("one", "two"):
        (folder / name).mkdir()
        nodes.append(Daemon(folder / name, "process"))
        nodes[-1].node = f"{folder.name}-{name}"
    try:
        for node in nodes:
            await node.start()
            assert [d["state"] for d in await node.get("/v1/devices")] == ["ok"] * 11
        ids = [{d["stable_id"] for d in await node.get("/v1/devices")} for node in nodes]
        assert not {i for i in ids[0] & ids[1] if i.startswith("SIM-")}
        assert f"SIM-{nodes[0].node}-cuda-cuda0" in ids[0]
    finally:
        for node in nodes:
            await node.close()
