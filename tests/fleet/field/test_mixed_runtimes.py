"""Fleets with containers on some nodes and processes on others, and engines that come and go."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from end_to_end.fleet.fleet_world import GatewayProgram, World
from support.daemon import Daemon
from support.engine import stub_engine
from support.engine_proxy import EngineProxy
from support.waiting import until

IMAGE = {"image": "agentd-test:1"}


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[EngineProxy]:
    """An engine that keeps containers in memory, behind a proxy that can be stopped."""
    with stub_engine(folder / "stub.sock"):
        proxy = EngineProxy(folder / "engine.sock", folder / "stub.sock")
        await proxy.start()
        yield proxy
        await proxy.stop()


async def start_docker_node(world: World, engine: EngineProxy) -> str:
    folder = world.folder / "docker"
    folder.mkdir()
    daemon = Daemon(folder, "docker")
    daemon.engine = engine.path
    daemon.node = "with-docker"
    await daemon.start()
    world.nodes[daemon.node], world.kinds[daemon.node] = daemon, ""
    return daemon.node


async def reason(gateway: GatewayProgram, node: str) -> str:
    return (await gateway.get(f"/v1/nodes/{node}"))["reason"]


@pytest.mark.parametrize("policy", ["random", "pack"])
async def test_requests_find_the_runtime_that_they_need(
    world: World, engine: EngineProxy, policy: str
) -> None:
    await world.start_etcd()
    (processes,) = await world.start_nodes("none")
    containers = await start_docker_node(world, engine)
    for node in (processes, containers):
        world.join(node)
    gateway = world.gateway(gateway=f'policy = "{policy}"\n')
    await gateway.until({processes: "ready", containers: "ready"})
    for number in range(6):
        kernel, node = ({}, processes) if number % 2 else (IMAGE, containers)
        made = await gateway.create(kernel_id=f"k{number}", **kernel)
        assert (made.status, made.json.get("node_id")) == (201, node), made.content
    for node, kernel in ((processes, IMAGE), (containers, {})):
        refused = await gateway.create(placement={"nodes": [node]}, **kernel)
        assert (refused.status, refused.json["code"]) == (422, "InvalidRequest")
        assert [row["nodes"] for row in refused.json["classes"]] == [[node]]


async def test_node_without_engine_takes_creates_once_it_is_back(
    world: World, engine: EngineProxy
) -> None:
    await world.start_etcd()
    containers = await start_docker_node(world, engine)
    world.join(containers)
    gateway = world.gateway()
    await gateway.until({containers: "ready"})
    assert (await gateway.create(kernel_id="k1", **IMAGE)).status == 201
    await engine.stop()
    said = "runtime docker is unavailable"
    await until(lambda: reason(gateway, containers), lambda text: text == said)
    refused = await gateway.create(kernel_id="k2", **IMAGE)
    assert (refused.status, refused.json["code"]) == (503, "NodeUnavailable")
    assert refused.json["classes"] == [{"reason": said, "count": 2, "nodes": [containers]}]
    assert (await gateway.call("DELETE", "/v1/kernels/k2")).status == 404  # no route is left
    await engine.start()
    await until(lambda: reason(gateway, containers), lambda text: text == "", within_s=60)
    assert (await gateway.create(kernel_id="k2", **IMAGE)).status == 201
