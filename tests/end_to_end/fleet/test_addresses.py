"""A gateway without etcd at the first mistakes of a new user, and while its nodes move."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from end_to_end.fleet.fleet_world import World
from support.fork_server import run
from support.stub_node import StubNode
from support.waiting import until

NEVER: dict[str, tuple[str, str]] = {
    "nothing listens": ("", "unreachable: "),
    "another token": ('{"code": "Unauthorized", "detail": "unknown token"}', "unknown token"),
    "another program": ("<html>", "unreadable: "),
}
"""The answer at the address, and a part of the reason."""


@pytest.mark.parametrize("case", NEVER)
async def test_address_never_heard_is_told_with_the_reason(
    world: World, folder: Path, case: str
) -> None:
    answer, reason = NEVER[case]
    stub = StubNode(folder / "stub.sock")
    status = 401 if "Unauthorized" in answer else 200
    for path in ("/v1/node", "/v1/events"):
        stub.damage[path] = lambda: web.Response(text=answer, status=status)
    if answer:
        await stub.start()
    address = f"unix:{stub.path}"
    gateway = world.gateway(f'[fleet]\nnodes = ["{address}"]\n')
    await gateway.until({address: "lost"})
    await gateway.until_logged("gateway.ready")
    (row,) = await gateway.get("/v1/nodes")
    assert (row["url"], reason in row["reason"]) == (address, True), row
    for body in ({}, {"placement": {"nodes": ["n1"]}}, {"placement": {"labels": {"a": "b"}}}):
        refused = await gateway.create(**body)
        assert refused.status == 503, refused.content
        assert address in refused.json["detail"]
    ready = await gateway.call("GET", "/readyz")
    assert (ready.status, address in ready.json["status"]) == (503, True)
    assert (await gateway.call("GET", "/metrics")).status == 200
    assert (await gateway.call("GET", "/v1/kernels")).headers["Fleet-Missing"] == address
    lines = [line for line in gateway.log.splitlines() if address in line]
    assert len([line for line in lines if reason in line]) == 1, lines
    if answer:
        await stub.stop()


async def test_gateway_serves_the_nodes_it_hears_beside_others(world: World) -> None:
    (good,) = await world.start_nodes("none")
    missing = f"unix:{world.folder}/none.sock"
    nodes = [f"unix:{world.nodes[good].folder}/agentd.sock", missing]
    gateway = world.gateway(f"[fleet]\nnodes = {json.dumps(nodes)}\n")
    await gateway.until({good: "ready", missing: "lost"})
    await until(lambda: gateway.call("GET", "/readyz"), lambda answer: answer.status == 200)
    assert (await gateway.create()).status == 201
    unknown = await gateway.create(placement={"nodes": ["nope"]})
    assert (unknown.status, unknown.json["code"]) == (404, "UnknownNode")


async def test_node_that_moves_or_does_not_answer_needs_no_restart(world: World) -> None:
    """It is the node of its id at the other address, and one that is gone can be forgotten."""
    moving, gone = await world.start_nodes("none", "none")
    links = [world.folder / name for name in ("a.sock", "b.sock", "c.sock")]
    links[0].symlink_to(world.nodes[moving].folder / "agentd.sock")
    links[2].symlink_to(world.nodes[gone].folder / "agentd.sock")
    listed = [f"unix:{link}" for link in links]
    gateway = world.gateway(
        f"[fleet]\nnodes = {json.dumps(listed)}\n",
        deadlines={"agentd_fleet.store.sqlite_store.TAKEOVER_S": 0.5},
    )
    await gateway.until({moving: "ready", gone: "ready"})
    await until(lambda: gateway.call("GET", "/readyz"), lambda answer: answer.status == 200)
    only: Any = {"placement": {"nodes": [moving]}}
    assert (await gateway.create(kernel_id="k1", **only)).status == 201
    kept = await gateway.call("DELETE", f"/v1/nodes/{gone}")
    assert kept.status == 422
    links[0].replace(links[1])
    links[2].unlink()
    for node in (moving, gone):
        daemon = world.nodes[node]
        await daemon.stop()
        await daemon.start()
    await until(
        lambda: gateway.get(f"/v1/nodes/{moving}"),
        lambda row: (row["url"], row["state"]) == (listed[1], "ready"),
    )
    assert (await gateway.get("/v1/kernels/k1"))["node_id"] == moving
    await gateway.until({gone: "daemon-down"})
    words = ["agentctl", "--fleet", f"unix:{gateway.socket}", "fleet", "nodes", "forget", "--yes"]
    done = await asyncio.to_thread(run, *words, gone)
    assert done.returncode == 0, done.stderr
    assert await gateway.states() == {moving: "ready", listed[0]: "lost", listed[2]: "lost"}
    links[2].symlink_to(world.nodes[gone].folder / "agentd.sock")
    await gateway.until({gone: "ready"})
