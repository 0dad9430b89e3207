"""Creates beside nodes that report and cannot be called, with real gateways, etcd and daemons."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from agentd.core.slots import BUILT_IN
from agentd_fleet.view.reports import FreeReport, NodeReport, slot_type_report
from end_to_end.fleet.fleet_world import World
from end_to_end.fleet.network import SilentNameServer
from support.waiting import until

DEAD = [f"dead-{number}" for number in range(8)]
AMOUNTS = {"cpu": "1", "mem": str(1 << 30)}
"""Less than any daemon has, so that `pack` begins there."""
PACK = 'policy = "pack"\n'
ANSWER = {"agentd_fleet.nodes.calls.ANSWER_TIMEOUT_S": 1.0}


async def publish(world: World, urls: dict[str, str]) -> None:
    """Publish reports of nodes, as their publishers would."""
    async with world.client() as etcd:
        for node_id, url in urls.items():
            report = NodeReport(
                install_id=node_id,
                boot_id="b",
                version="0",
                url=url,
                agents={"agent-1": AMOUNTS},
                capacity=AMOUNTS,
                slot_types=[slot_type_report(slot) for slot in BUILT_IN],
            )
            free = FreeReport({"agent-1": AMOUNTS}, {}, AMOUNTS)
            await etcd.put(f"/agentd/main/nodes/{node_id}", msgspec.json.encode(report))
            await etcd.put(f"/agentd/main/free/{node_id}", msgspec.json.encode(free))


async def dropped(world: World) -> dict[str, str]:
    proxies = [await world.proxy("http://127.0.0.1:1") for _ in DEAD]
    for proxy in proxies:
        proxy.drop()
    return {name: proxy.endpoint for name, proxy in zip(DEAD, proxies, strict=True)}


async def refused(_: World) -> dict[str, str]:
    return {name: f"https://127.0.0.1:{number}" for number, name in enumerate(DEAD, 1)}


async def silent(world: World) -> dict[str, str]:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    path = f"{world.folder}/silent.sock"
    await asyncio.start_unix_server(accept, path)
    return dict.fromkeys(DEAD, f"unix:{path}")


@pytest.mark.parametrize("policy", ["random", "pack"])
@pytest.mark.parametrize("die", [dropped, refused, silent])
async def test_create_beside_dead_nodes_finds_the_good_one(
    world: World, die: Callable[[World], Awaitable[dict[str, str]]], policy: str
) -> None:
    await world.start_etcd()
    (good,) = await world.start_nodes("none")
    await publish(world, await die(world))
    world.join(good)
    gateway = world.gateway(gateway=f'policy = "{policy}"\n', deadlines=ANSWER)
    await gateway.until(dict.fromkeys([*DEAD, good], "ready"))
    for number in range(4):
        made = await gateway.create(kernel_id=f"k{number}")
        assert (made.status, made.json.get("node_id")) == (201, good), made.content
    refused_all = await gateway.create(kernel_id="k9", slots={"cpu": 1}, placement={"nodes": DEAD})
    assert refused_all.status == 503
    assert refused_all.json["code"] == "NodeUnavailable"
    assert (await gateway.call("GET", "/v1/kernels/k9")).status == 404
    nodes = {node["id"]: node["reason"] for node in await gateway.get("/v1/nodes")}
    assert nodes.pop(good) == ""
    assert all(reason.startswith("unreachable: ") for reason in nodes.values()), nodes
    assert all(gateway.log.count(f"node_id={name} ") <= 1 for name in DEAD), gateway.log
    assert gateway.log.count("node.unreachable") == len(DEAD)


async def test_silent_name_server_costs_no_create_of_a_good_node(
    world: World, name_server: SilentNameServer
) -> None:
    await world.start_etcd()
    (good,) = await world.start_nodes("none")
    await publish(world, {name: f"https://{name}.example.org:6001" for name in DEAD})
    world.join(good)
    gateway = world.gateway(gateway=PACK, prefix=name_server.prefix)
    await gateway.until(dict.fromkeys([*DEAD, good], "ready"))
    loop = asyncio.get_running_loop()
    for number in range(2):
        began = loop.time()
        made = await gateway.create(kernel_id=f"k{number}")
        assert (made.status, made.json.get("node_id")) == (201, good), made.content
        assert loop.time() - began < 60  # 10 s and more for each name, once
    assert name_server.asked
    await until(lambda: gateway.log.count("node.unreachable"), lambda count: count == len(DEAD))
    await gateway.stop()  # while lookups are pending
    assert "Traceback" not in gateway.log
