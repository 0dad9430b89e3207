"""Agentds on one host that find the same devices: files that each one's glob finds."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support import fork_server
from support.daemon import Daemon
from support.needs import require

AGENT = '[[agents]]\nid = "agent-1"\n'
AS_USER = """
import os, runpy, sys
os.geteuid = lambda: 4711
sys.argv[0] = "agentd"
runpy.run_module("agentd", run_name="__main__")
"""
"""agentd of another user, who need not be able to run this Python."""


class Host:
    """Two agentds of root, each with a node id of its own, and one folder of device files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for number in range(2):
            os.mknod(folder / f"acc{number}", 0o666 | 0o020000, os.makedev(1, 3))
        self.table = f'[plugins.acc]\nplugin = "generic"\ndevices = ["{folder}/acc*"]\n'
        self.one, self.two = self.daemon("one"), self.daemon("two")

    def daemon(self, name: str) -> Daemon:
        (self.folder / name).mkdir()
        made = Daemon(self.folder / name, "process")
        made.node = f"{self.folder.name}-{name}"
        made.run_folder = self.folder / "run"
        return made

    async def start(self, daemon: Daemon) -> None:
        await daemon.start(AGENT + self.table)

    @property
    def line(self) -> dict | None:
        text = (self.folder / "run/host.lock").read_text()
        return json.loads(text) if text else None

    async def close(self) -> None:
        for daemon in (self.one, self.two):
            daemon.boot_id = ""
            if daemon.config_file.exists():
                await daemon.close()


@pytest.fixture
async def host(folder: Path) -> AsyncIterator[Host]:
    require("root")  # device files are made by it
    made = Host(folder)
    yield made
    await made.close()


async def states(daemon: Daemon) -> list[str]:
    found = await daemon.get("/v1/devices")
    return [device["state"] for device in found if device["device_name"] == "acc"]


async def test_the_second_daemon_withholds_what_the_first_serves(host: Host) -> None:
    await host.start(host.one)
    await host.start(host.two)
    assert await states(host.one) == ["ok", "ok"]
    assert await states(host.two) == ["withheld", "withheld"]
    assert host.line is not None
    name = f"agentd {host.one.node} (pid {host.line['pid']}; see {host.folder}/run/host.lock)"
    warnings = (await host.two.get("/v1/node"))["warnings"]
    assert f"2 devices of acc are withheld (acc0, acc1): served by {name}" in warnings
    assert f"cores and memory are shared with another agentd: served by {name}" in warnings
    assert (await host.two.get("/v1/agents/agent-1"))["slots"]["acc.device"]["capacity"] == "0"
    answer = await host.two.create(slots={"acc.device": 1})
    assert (answer.status, answer.json["code"]) == (409, "InsufficientResource")
    assert f"withheld: served by {name}" in answer.content.decode()
    await host.two.running(slots={"cpu": 1})
    await host.one.running(slots={"acc.device": 2})


@pytest.mark.parametrize("command", ["plan", "check-config"])
async def test_command_withholds_as_a_start_would(host: Host, command: str) -> None:
    await host.start(host.one)
    for daemon, is_other in ((host.two, True), (host.one, False)):
        daemon.configure(AGENT + host.table)
        words = ("agentd", command, "--json", "--config", str(daemon.config_file))
        env = {**os.environ, "AGENTD_RUN_DIR": str(daemon.run_folder)}
        shown = await asyncio.to_thread(fork_server.run, *words, env=env)
        text = "\n".join(json.loads(shown.stdout)["warnings"])
        assert (f"served by agentd {host.one.node}" in text) is is_other, text
        assert ("cores and memory are shared" in text) is is_other


@pytest.mark.parametrize("holds", [True, False])
async def test_killed_daemon_keeps_its_kernels_devices(host: Host, holds: bool) -> None:
    await host.start(host.one)
    if holds:
        await host.one.running(slots={"acc.device": 2}, kernel_id="k1")
    await host.one.stop(signal.SIGKILL)
    await host.start(host.two)
    assert await states(host.two) == ["withheld"] * 2
    await host.start(host.one)
    assert await states(host.one) == ["ok"] * 2, "its own node takes them up again"
    assert await states(host.two) == ["withheld"] * 2


@pytest.mark.parametrize("left", ["nothing", "kernel", "claim", "kernel of cores"])
async def test_a_stop_frees_the_host_if_nothing_is_left(host: Host, left: str) -> None:
    await host.start(host.one)
    match left:
        case "kernel":
            await host.one.running(slots={"acc.device": 1}, kernel_id="k1")
        case "claim":
            body = {"claim_id": "c1", "slots": {"acc.device": 1}, "holder": {"name": "x"}}
            assert (await host.one.call("POST", "/v1/agents/agent-1/claims", body)).status == 201
        case "kernel of cores":
            await host.one.running(slots={"cpu": 1}, kernel_id="k1")
    assert await host.one.stop() == 0
    stays = left in ("kernel", "claim")
    assert (host.line is not None) is stays
    await host.start(host.two)
    assert await states(host.two) == (["withheld"] if stays else ["ok"]) * 2


async def test_another_node_serves_after_a_reboot(host: Host) -> None:
    await host.start(host.one)
    await host.one.stop(signal.SIGKILL)
    host.two.boot_id = "11111111-2222-3333-4444-555555555555"
    await host.start(host.two)
    assert await states(host.two) == ["ok"] * 2


async def test_a_device_that_appears_late_is_withheld_too(host: Host) -> None:
    host.table = host.table.replace(
        "[plugins.acc]", "[plugins]\nhealth-interval = 0.1\n[plugins.acc]"
    )
    await host.start(host.one)
    await host.start(host.two)
    os.mknod(host.folder / "acc2", 0o666 | 0o020000, os.makedev(1, 3))
    async with asyncio.timeout(15):
        while await states(host.two) != ["withheld"] * 3 or await states(host.one) != ["ok"] * 3:
            await asyncio.sleep(0.05)


async def test_a_users_daemon_yields_to_roots(host: Host) -> None:
    user = host.two
    user.program = ("-c", AS_USER)
    await user.start(AGENT + host.table, XDG_RUNTIME_DIR=str(user.folder))
    assert await states(user) == ["ok"] * 2
    await host.start(host.one)
    for expected in ("withheld", "ok"):
        async with asyncio.timeout(15):
            while await states(user) != [expected] * 2:
                await asyncio.sleep(0.05)
        await host.one.stop()


async def test_simulated_devices_never_meet(folder: Path) -> None:
    nodes = []
    for name in ("one", "two"):
        (folder / name).mkdir()
        nodes.append(Daemon(folder / name, "process"))
        nodes[-1].node = f"{folder.name}-{name}"
        nodes[-1].run_folder = folder / "run"
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
