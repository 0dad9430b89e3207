"""The fleet's map in a real Chromium, and a node's own page and commands through the gateway."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from itertools import islice

import pytest
from playwright.async_api import Browser

from agentd.client import AsyncClient
from agentd.core.access import Caller, Role
from agentd.errors import Forbidden, KernelConflict
from end_to_end.browser import NODES_MS, shown_by, visit
from end_to_end.fleet.fleet_world import GatewayProgram, World
from end_to_end.test_exec_attacks import hang_up_behind_input, tcp_listener
from hostile.attacks import FRAMES, Client
from support import fork_server
from support.daemon import until_no_process

pytestmark = pytest.mark.asyncio(loop_scope="session")
READ = Caller("eye", Role.READ).to_text()


@pytest.fixture
async def fleet(world: World) -> tuple[World, GatewayProgram, list[str]]:
    nodes = await world.start_nodes("cuda", "none")
    gateway = world.gateway(world.followed())
    await gateway.until(dict.fromkeys(nodes, "ready"))
    return world, gateway, nodes


async def test_all_nodes_are_seen_and_each_is_one_click_away(fleet, browser: Browser) -> None:
    world, gateway, (cuda, bare) = fleet
    command = ["sh", "-c", "echo hello from inside; exec sleep 1000"]
    made = await gateway.create(kernel_id="far", slots={"cuda.device": 1}, command=command)
    assert made.status == 201, made.content
    await gateway.until_free(cuda, "cuda.device", "3")
    async with (
        shown_by("--fleet", f"unix:{gateway.socket}") as address,
        visit(browser, address, has_clock=True) as page,
    ):
        await page.until("#tiles", "2 of 2 nodes ready")
        await page.until("#tiles", "3 of 4 cuda.device free")
        assert bare in await page.text("#nodes")
        assert await page.faults() == []
        await page.page.click(f"a:has-text('{cuda}')")
        await page.page.wait_for_selector("#main:not([hidden])")
        await page.until("#rows", "far")
        assert await page.text("#node") == cuda
        await page.page.click("text=far")
        await page.until("#details .output", "hello from inside")
        await page.page.click("#details button:has-text('Stop')")
        await page.page.click("#details button:has-text('Really stop?')")
        await page.until("#details .facts", "terminated")
        await gateway.until_free(cuda, "cuda.device", "4")
        await page.page.go_back()
        await page.until("#tiles", "4 of 4 cuda.device free")
        await gateway.call("POST", f"/v1/nodes/{bare}/cordon", {"reason": "new disk"})
        await page.next_reading("/v1/nodes", NODES_MS)
        await page.until("#nodes", "ready, cordoned")
        await page.until("#nodes", "ago: new disk")
        await page.until("#tiles", "2 of 2 nodes ready")
        await world.nodes[bare].stop(signal.SIGKILL)
        await gateway.until({bare: "daemon-down"})
        await page.next_reading("/v1/nodes", NODES_MS)
        await page.until("#nodes", "daemon-down")
        await page.until("#tiles", "1 of 2 nodes ready")
        await page.until("#tiles", "4 of 4 cuda.device free")


async def test_a_command_runs_inside_a_kernel_through_the_gateway(fleet) -> None:
    _, gateway, (cuda, _) = fleet
    made = await gateway.create(kernel_id="far", slots={"cuda.device": 1})
    assert made.status == 201, made.content
    async with AsyncClient(gateway.socket) as client:
        got = b""
        async with client.exec("far", ["sh", "-c", "cat; exit 5"]) as running:
            data = bytes(range(256)) * 4096
            await running.write(data)
            await running.close_input()
            async for stream, chunk in running:
                assert stream == 1
                got += chunk
        assert (running.exit_code, got == data) == (5, True)
        marker = os.urandom(8).hex()
        looping = ["sh", "-c", "echo; while :; do echo y; done"]
        async with client.exec("far", looping, env={"MARKER": marker}) as running:
            await anext(aiter(running))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await running.write(bytes(8 << 20))
        await until_no_process(marker)
        use = await gateway.get("/v1/kernels/far/stats")
        assert (use["node_id"], use["kernel_id"]) == (cuda, "far")
        await gateway.call("POST", "/v1/kernels/far/stop", {"timeout": 0})
        with pytest.raises(KernelConflict):
            async with client.exec("far", ["true"]):
                pass
        client._session.headers["Agentd-Caller"] = READ
        with pytest.raises(Forbidden):
            async with client.exec("far", ["true"]):
                pass


async def test_a_flood_of_control_frames_is_cut_off_at_the_gateway(fleet) -> None:
    _, gateway, _ = fleet
    made = await gateway.create(kernel_id="far", slots={"cuda.device": 1})
    assert made.status == 201, made.content
    for name in ("resize", "ping"):
        reader, writer = await asyncio.open_unix_connection(str(gateway.socket))
        writer.writelines(islice(Client("", "far").socket({"command": ["cat"]}, FRAMES[name]), 3))
        async with asyncio.timeout(30):
            await reader.readuntil(b"more than 256 control frames in 1 s")
        writer.transport.abort()
    assert "exec.aborted" in gateway.log


async def test_caller_of_a_gateway_that_hangs_up_ends_its_command(world: World) -> None:
    nodes = await world.start_nodes("none")
    port, listen, token = tcp_listener(world.folder)
    gateway = world.gateway(world.followed(), gateway=f"{listen}\n", rpc=f"[rpc]\n{token}\n")
    await gateway.until(dict.fromkeys(nodes, "ready"))
    assert (await gateway.create(kernel_id="k1")).status == 201
    marker = os.urandom(8).hex()
    await hang_up_behind_input(port, marker)
    await until_no_process(marker)


async def test_command_line_inspects_kernels_of_all_nodes(fleet) -> None:
    world, gateway, (cuda, _) = fleet
    assert (await gateway.create(kernel_id="far", slots={"cuda.device": 1})).status == 201
    await world.nodes[cuda].running(kernel_id="direct", command=["sleep", "1000"])

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return fork_server.run("agentctl", "--fleet", f"unix:{gateway.socket}", *words)

    done = await asyncio.to_thread(run, "fleet", "exec", "far", "--", "sh", "-c", "echo in; exit 4")
    assert (done.returncode, done.stdout) == (4, "in\n")
    done = await asyncio.to_thread(run, "exec", "--node", cuda, "direct", "echo", "there")
    assert (done.returncode, done.stdout) == (0, "there\n"), done.stderr
    shown = await asyncio.to_thread(run, "top", "--count", "1", "--interval", "1.1")
    assert shown.returncode == 0, shown.stderr
    assert f"{cuda}/far" in shown.stdout
    listed = await asyncio.to_thread(run, "ls", "-o", "json")
    places = {row["kernel_id"]: row["node_id"] for row in json.loads(listed.stdout)}
    assert places == {"far": cuda, "direct": cuda}
    table = await asyncio.to_thread(run, "ls")
    assert table.stdout.split()[:2] == ["KERNEL", "NODE"]
    usage = await asyncio.to_thread(run, "stats", "-o", "json")
    assert f"{cuda}/far" in {row["kernel_id"] for row in json.loads(usage.stdout)}
    about_one = await asyncio.to_thread(run, "drain", "cuda0")
    assert (about_one.returncode, "is a command for one node" in about_one.stderr) == (2, True)
    removed = await asyncio.to_thread(run, "rm", "--timeout", "0", "-o", "json", "far")
    assert json.loads(removed.stdout) == {"removed": ["far"]}
