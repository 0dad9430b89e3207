"""Calls for kernels of a node that is known not to answer end soon, and none reports success."""

import asyncio
import signal

import pytest

from agentd.client import AsyncClient
from agentd.errors import NodeUnavailable
from end_to_end.fleet.fleet_world import GatewayProgram, World
from support.daemon import Answer

ENDS_WITHIN_S = 15.0
"""Three times the bound, and half of the 30 s that a node has otherwise."""
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}


async def calls(gateway: GatewayProgram, node: str) -> dict[str, Answer]:
    """Make every call for a kernel at once."""
    path, body = "/v1/kernels/k1", {"kernel_id": "k1"}
    made = {
        "create": gateway.create(**body),
        "show": gateway.call("GET", path),
        "show at its node": gateway.call("GET", f"{path}?node={node}"),
        "stop": gateway.call("POST", f"{path}/stop", {}),
        "delete": gateway.call("DELETE", path),
        "delete at its node": gateway.call("DELETE", f"{path}?node={node}"),
        "logs": gateway.call("GET", f"{path}/logs"),
        "stats": gateway.call("GET", f"{path}/stats"),
        "exec": gateway.call("GET", f"{path}/exec", headers=UPGRADE),
        "pass on": gateway.call("GET", f"/v1/nodes/{node}/kernels/k1"),
    }
    async with asyncio.timeout(ENDS_WITHIN_S):
        answers = await asyncio.gather(*made.values())
    return dict(zip(made, answers, strict=True))


@pytest.mark.parametrize("state", ["daemon-down", "lost", "ready"])
async def test_call_for_a_kernel_of_a_silent_node_fails_soon(world: World, state: str) -> None:
    await world.start_etcd()
    (node,) = await world.start_nodes("none")
    proxy = await world.proxy(node)
    publisher = world.join(
        node, url=proxy.endpoint, deadlines={"agentd_fleet.nodes.reader.PROBE_TIMEOUT_S": 1.0}
    )
    gateway = world.gateway(deadlines={"agentd_fleet.nodes.calls.KEEPALIVE_S": 0.0})
    await gateway.until({node: "ready"})
    assert (await gateway.create(kernel_id="k1")).status == 201
    process = world.nodes[node].process
    assert process is not None
    if state == "ready":  # a firewall between it and this gateway
        proxy.drop()
        assert (await gateway.call("GET", "/v1/kernels/k1/stats")).status == 503
        (listed,) = await gateway.get("/v1/nodes")
        assert listed["reason"] == "unreachable: no answer in time"
    else:
        process.send_signal(signal.SIGSTOP)
        if state == "lost":
            await publisher.stop(signal.SIGKILL)
        await gateway.until({node: state})
    answers = await calls(gateway, node)
    if state == "lost":
        shown = [answers.pop(name).json["state"] for name in ("show", "show at its node")]
        assert shown == ["unknown", "unknown"]
    assert {name: answer.status for name, answer in answers.items()} == dict.fromkeys(answers, 503)
    process.send_signal(signal.SIGCONT)
    proxy.mend()
    assert await world.census() == {"k1": [node]}


async def test_exec_ends_with_the_path_to_its_node(world: World) -> None:
    await world.start_etcd()
    (node,) = await world.start_nodes("none")
    proxy = await world.proxy(node)
    world.join(node, url=proxy.endpoint)
    gateway = world.gateway(deadlines={"agentd.client.exec.SILENCE_S": 2.0})
    await gateway.until({node: "ready"})
    assert (await gateway.create(kernel_id="k1")).status == 201
    command = ["sh", "-c", "echo; sleep 100000"]
    async with AsyncClient(gateway.socket) as client, client.exec("k1", command) as running:
        await anext(aiter(running))
        proxy.drop()
        with pytest.raises(NodeUnavailable, match=f"node {node}: no sign of life for 2 s"):
            async for _ in running:
                pass
    proxy.mend()
