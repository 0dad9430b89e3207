"""The view of gateways is true after a restart, after a cut, and beside an older gateway."""

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from agentd.core.access import Caller, Role
from end_to_end.fleet.fleet_world import GatewayProgram, World
from end_to_end.fleet.network import Proxy
from support.needs import OLDER, ROOT, require
from support.waiting import until

TEAM = {"Agentd-Caller": Caller("team-x", Role.AGENT, frozenset({"agent-2"})).to_text()}
OTHERS = {"Agentd-Caller": Caller("team-y", Role.AGENT, frozenset({"agent-7"})).to_text()}
SAID = {"schema": 1, "install_id": "i", "boot_id": "b", "version": "9", "url": "unix:/nowhere"}
CHIP = {"name": "ghost.chip", "kind": "count", "quantum": "1"}


async def told(gateway: GatewayProgram, path: str, headers: Any = None) -> tuple[int, Any]:
    answer = await gateway.call("GET", path, headers=headers)
    return answer.status, answer.json


async def test_lost_node_stays_lost_over_a_restart(world: World) -> None:
    await world.start_etcd()
    cuda, rocm = await world.start_nodes("cuda", "rocm")
    publishers = [world.join(node) for node in (cuda, rocm)]
    gateway, other = world.gateway(), world.gateway()
    for each in (gateway, other):
        await each.until({cuda: "ready", rocm: "ready"})
    only = {"placement": {"nodes": [rocm]}}
    assert (await gateway.create(TEAM, kernel_id="k1", **only)).status == 201
    await publishers[1].stop(signal.SIGKILL)
    await gateway.until({rocm: "lost"}, within_s=15)
    await gateway.stop(signal.SIGKILL)
    gateway.start()
    await gateway.until({rocm: "lost", cuda: "ready"})
    metrics = (await gateway.call("GET", "/metrics")).content.decode()
    assert 'agentd_fleet_nodes{state="lost"} 1.0' in metrics
    in_use = await gateway.call("DELETE", "/v1/slot-types/rocm.device")
    assert (in_use.status, in_use.json["code"]) == (409, "SlotTypeInUse")
    for path in ("/v1/kernels", f"/v1/kernels?node={rocm}", "/v1/kernels?limit=9"):
        status, shown = await told(gateway, path, TEAM)
        found = [(k["kernel_id"], k["state"]) for k in shown if k["node_id"] == rocm]
        assert (status, found) == (200, [("k1", "unknown")]), path
    status, shown = await told(gateway, f"/v1/kernels/k1?node={rocm}", TEAM)
    assert (status, shown["state"]) == (200, "unknown")
    for path in (f"/v1/kernels?node={rocm}", f"/v1/kernels/k1?node={rocm}", "/v1/kernels/k1"):
        assert (await told(gateway, path, OTHERS))[0] == 404, path
    assert "Fleet-Missing" not in (await gateway.call("GET", "/v1/kernels", None, OTHERS)).headers
    assert (await other.call("DELETE", f"/v1/nodes/{rocm}")).status == 204
    async with asyncio.timeout(20):
        for each in (gateway, other):
            while rocm in await each.states():
                await asyncio.sleep(0.02)
    assert (await gateway.call("DELETE", "/v1/slot-types/rocm.device")).status == 204
    assert (await told(gateway, "/v1/kernels/k1"))[0] == 404


async def test_a_node_that_is_back_is_not_forgotten(world: World) -> None:
    await world.start_etcd()
    gateway = world.gateway()
    async with world.client() as etcd:
        await etcd.put("/agentd/main/known/ghost", b'{"schema": 9}')
        await gateway.until({"ghost": "lost"})
        await etcd.put("/agentd/main/nodes/ghost", msgspec.json.encode(SAID))
        assert not await etcd.delete_unless_exists(
            "/agentd/main/nodes/ghost", "/agentd/main/known/ghost"
        )
        assert await etcd.get("/agentd/main/known/ghost") is not None
        await gateway.until({"ghost": "ready"})
        assert (await gateway.call("DELETE", "/v1/nodes/ghost")).status == 422


async def test_store_is_read_again_after_a_compaction(world: World) -> None:
    servers = await world.start_etcd(is_own=True)
    proxy = Proxy(servers.endpoints[0])
    await proxy.start()
    gateway = world.gateway(f'[fleet]\netcd = ["{proxy.endpoint}"]\n')
    try:
        async with world.client() as etcd:
            report = msgspec.json.encode({**SAID, "slot_types": [CHIP]})
            await etcd.put("/agentd/main/nodes/ghost", report)
            await etcd.put("/agentd/main/known/ghost", b"{}")
            await etcd.put("/agentd/main/nodes/gone", msgspec.json.encode(SAID))
            await etcd.put("/agentd/main/known/gone", b"{}")
            await gateway.until({"ghost": "ready", "gone": "ready"})
            await until(
                lambda: etcd.get("/agentd/main/slot-types/ghost.chip"),
                lambda value: value is not None,
            )
            await proxy.cut()
            for key in ("nodes/ghost", "known/ghost", "slot-types/ghost.chip", "nodes/gone"):
                await etcd.delete(f"/agentd/main/{key}")
            await servers.compact(await etcd.revision())
        proxy.mend()
        async with asyncio.timeout(30):
            while await gateway.states() != {"gone": "lost"}:
                await asyncio.sleep(0.05)
            while "ghost.chip" in {s["name"] for s in await gateway.get("/v1/slot-types")}:
                await asyncio.sleep(0.05)
    finally:
        await proxy.stop()


@pytest.fixture
async def older_tree(folder: Path) -> AsyncIterator[Path]:
    """The files of version 0.2, for as long as a test lasts."""
    require("older-version", "etcd")
    tree, git = folder / "older", ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--detach", tree, OLDER], check=True, capture_output=True)
    yield tree
    subprocess.run([*git, "remove", "--force", tree], check=True, capture_output=True)


async def test_older_gateway_places_and_frees_the_same_ids(world: World, older_tree: Path) -> None:
    await world.start_etcd()
    nodes = await world.start_nodes("cuda", "none")
    for node in nodes:
        world.join(node)
    paths = f"{older_tree}/src:{older_tree}/fleet/src"
    older = GatewayProgram(world.folder, "older", world.kept_in)
    older.prefix, older.environ = ("env",), {"PYTHONPATH": paths}
    world.programs.append(older)
    older.start()
    newer = world.gateway()
    for gateway in (older, newer):
        await gateway.until(dict.fromkeys(nodes, "ready"))

    async with world.client() as etcd:
        await etcd.put("/agentd/main/nodes/next", msgspec.json.encode({**SAID, "schema": 2}))
    await newer.until({"next": "newer-schema"})
    await older.until({"next": "ready"})  # as that version has it: it is the older one's code

    async def life(number: int) -> None:
        """One kernel that is made at one gateway, found at both, and deleted at this version's."""
        body = {"kernel_id": f"k{number}", "slots": {"cpu": 0, "mem": "1m"}}
        first, second = (older, newer) if number % 2 else (newer, older)
        made = await first.create(**body)
        assert made.status == 201, made.content
        again = await second.create(**body)
        assert (again.status, again.json["node_id"]) == (200, made.json["node_id"])
        deleted = await newer.call("DELETE", f"/v1/kernels/k{number}?timeout=0")
        assert deleted.status == 204, deleted.content
        body["slots"] = {"cpu": 0, "mem": "2m"}
        other = await second.create(**body)
        assert other.status == 201, other.content

    await asyncio.gather(*(life(number) for number in range(16)))
    census = await world.census()
    assert sorted(census) == sorted(f"k{number}" for number in range(16))
    assert all(len(on) == 1 for on in census.values())
    assert "unreadable" not in older.log + newer.log
    with contextlib.suppress(aiohttp.ClientError):
        await older.stop()
