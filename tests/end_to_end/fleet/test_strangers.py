"""One node, or one value in the store, that nobody can read, beside a good node."""

import asyncio
import copy
import resource
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from end_to_end.fleet.fleet_world import GatewayProgram, World
from support.stub_node import NODE_PAGES, StubNode

DAMAGES: dict[str, Any] = {
    "/v1/node": {"id": "n1", "version": "9"},
    "/v1/devices": [{"agents": ["main"], "state": "ok", "model": "\ud800", "slots": {}}],
}


@pytest.fixture
async def stranger(folder: Path) -> AsyncIterator[StubNode]:
    made = StubNode(folder / "stranger.sock")
    await made.start()
    yield made
    await made.stop()


async def until_reason(gateway: GatewayProgram, node: str, beginning: str) -> None:
    """Wait until a node is listed with a reason, or without one."""
    reason: str | None = None
    try:
        async with asyncio.timeout(20):
            while reason is None or not reason.startswith(beginning) or (reason and not beginning):
                await asyncio.sleep(0.02)
                nodes = {item["id"]: item for item in await gateway.get("/v1/nodes")}
                reason = nodes[node]["reason"] if node in nodes else None
    except TimeoutError:
        raise AssertionError(f"{reason}, not {beginning}:\n{gateway.log[-3000:]}") from None


async def use(gateway: GatewayProgram, good: str, **placement: Any) -> None:
    """Use the good node, and every list of the gateway."""
    for path in ("nodes", "stats", "slot-types", "kernels", "devices"):
        await gateway.get(f"/v1/{path}")
    assert (await gateway.call("GET", "/metrics")).status == 200
    made = await gateway.create(kernel_id="k1", placement=placement)
    assert (made.status, made.json["node_id"]) == (201, good), made.content
    deleted = await gateway.call("DELETE", "/v1/kernels/k1?timeout=0")
    assert deleted.status == 204, deleted.content


async def test_unreadable_node_ends_no_gateway(world: World, stranger: StubNode) -> None:
    (good,) = await world.start_nodes("none")
    stranger.answers["/v1/slot-types"][0]["kind"] = 7
    nodes = f'"unix:{world.nodes[good].folder}/agentd.sock", "unix:{stranger.path}"'
    gateway = world.gateway(f"[fleet]\nnodes = [{nodes}]\n")
    await gateway.until({good: "ready", "n1": "ready"})
    await until_reason(gateway, "n1", "unreadable: GET /v1/slot-types: Expected `str`")
    await use(gateway, good)
    stranger.answers = copy.deepcopy(NODE_PAGES)
    await until_reason(gateway, "n1", "")
    for path, answer in DAMAGES.items():
        stranger.answers[path] = answer
        stranger.end_streams()
        await until_reason(gateway, "n1", "unreadable: ")
        await use(gateway, good)
        stranger.answers = copy.deepcopy(NODE_PAGES)
        stranger.end_streams()
        await until_reason(gateway, "n1", "")
    stranger.damage["/v1/node"] = web.StreamResponse
    stranger.end_streams()
    await until_reason(gateway, "n1", "unreadable: the answer exceeds ")
    await use(gateway, good)
    assert gateway.is_running


async def test_unreadable_values_in_etcd_end_no_gateway(world: World) -> None:
    await world.start_etcd()
    (good,) = await world.start_nodes("none")
    world.join(good)
    gateway = world.gateway()
    await gateway.until({good: "ready"})
    values = (b"", b"null", b"[1]", b"\xff", b'{"schema": 1}', b"[" * 100_000,
              b'{"x": ' + b"[" * 100_000, b'{"schema": "one"}')  # fmt: skip
    async with world.client() as etcd:
        for value in values:
            for part in ("nodes", "free", "known", "slot-types", "routes"):
                await etcd.put(f"/agentd/main/{part}/odd", value)
            await etcd.put("/agentd/main/nodes/../odd", value)
            await etcd.put(f"/agentd/main/free/{good}x", value)
            await until_reason(gateway, "odd", "unreadable: ")
            await use(gateway, good)
            for part in ("nodes", "known"):
                await etcd.delete(f"/agentd/main/{part}/odd")
    late = world.gateway()
    await late.until({good: "ready"})
    await use(late, good)
    for program in (gateway, late):
        assert program.is_running


@pytest.mark.parametrize("fault", ["locked", "full"])
async def test_unwritable_file_ends_no_gateway(
    world: World, stranger: StubNode, fault: str
) -> None:
    (good,) = await world.start_nodes("none")
    nodes = f'"unix:{world.nodes[good].folder}/agentd.sock", "unix:{stranger.path}"'
    gateway = world.gateway(f"[fleet]\nnodes = [{nodes}]\n")
    await gateway.until({good: "ready", "n1": "ready"})
    await use(gateway, good, nodes=[good])
    file = world.folder / gateway.file.stem / "fleet.sqlite"
    types = [{"name": f"chip{number}.unit", "kind": "count", "quantum": "1", "unit": "x" * 99}
             for number in range(100)]  # fmt: skip
    base = sqlite3.connect(file, isolation_level=None)
    before = resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE)
    if fault == "locked":
        base.execute("BEGIN EXCLUSIVE")
    else:
        size = file.with_name("fleet.sqlite-wal").stat().st_size
        resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE, (size, before[1]))
    stranger.answers["/v1/slot-types"] += types
    stranger.end_streams()
    await gateway.until_logged("store.write_failed")
    refused = await gateway.create(kernel_id="k2", placement={"nodes": [good]})
    assert (refused.status, refused.json["code"]) == (503, "StateUnavailable")
    names = {slot["name"] for slot in await gateway.get("/v1/slot-types")}
    assert {item["name"] for item in types} <= names
    assert await gateway.states() == {good: "ready", "n1": "ready"}
    if fault == "locked":
        base.execute("ROLLBACK")
    else:
        resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE, before)
    await gateway.until_logged("store.recovered")
    rows = base.execute("SELECT count(*) FROM slot_types WHERE name LIKE 'chip%'").fetchall()
    base.close()
    assert rows == [(100,)]
    await use(gateway, good, nodes=[good])
    assert gateway.log.count("store.write_failed") == 1
