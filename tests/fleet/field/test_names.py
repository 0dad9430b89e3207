"""Names of nodes whose name server is silent, beside a node that is found."""

import json

from end_to_end.fleet.fleet_world import World
from end_to_end.fleet.network import Proxy, SilentNameServer


async def test_silent_name_server_keeps_no_other_node_away(
    world: World, name_server: SilentNameServer
) -> None:
    """A gateway without etcd looks up eight names in vain, and again and again."""
    (good,) = await world.start_nodes("none")
    proxy = Proxy(f"unix:{world.nodes[good].folder}/agentd.sock")
    await proxy.start()
    silent = [f"https://node-{number}.test:6001" for number in range(8)]
    address = proxy.endpoint.replace("127.0.0.1", "localhost")
    gateway = world.gateway(
        f"[fleet]\nnodes = {json.dumps([*silent, address])}\n", prefix=name_server.prefix
    )
    await gateway.until({good: "ready"}, within_s=60)
    rows = {row["id"]: row["reason"] for row in await gateway.get("/v1/nodes")}
    assert rows == {good: ""}  # before any of the others was given up
    assert name_server.asked
    await gateway.until(dict.fromkeys(silent, "lost"), within_s=60)
    await proxy.cut()
    await gateway.until({good: "daemon-down"})
    proxy.mend()
    await gateway.until({good: "ready"})
    await proxy.stop()
