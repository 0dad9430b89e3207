"""Networks that the configuration names and the engine lacks: shown before a create needs one."""

import asyncio

import pytest
from aiohttp import web

from support.daemon import Daemon
from support.engine_proxy import EngineProxy

NETWORKS = "GET .*/networks$"
NAMED = """allowed-networks = ["host", "container:db", "shared net"]
[[agents]]
id = "agent-1"
network = "team-1"
[[agents]]
id = "agent-2"
network = "bridge"
allowed-networks = ["team-2"]
"""
MISSING = {
    "shared net": ("runtime/docker", "runtime.docker.allowed-networks"),
    "team-1": ("agent/agent-1", "agents.0.network"),
    "team-2": ("agent/agent-2", "agents.1.allowed-networks"),
}


async def conditions(node: Daemon) -> dict[str, str]:
    found = (await node.get("/v1/node?check=true"))["conditions"]
    return {c["about"]: c["reason"] for c in found if "network" in c["reason"]}


async def test_missing_networks_are_conditions(
    field_node: Daemon, field_engine: EngineProxy
) -> None:
    expected = {
        about: f"{key}: the engine has no network {name!r}"
        for name, (about, key) in MISSING.items()
    }
    networks = [{"Name": "bridge", "Id": "1"}]

    async def list_networks(_: web.Request, __: bytes) -> web.Response:
        return web.json_response(networks)

    field_engine.rule(NETWORKS, list_networks, always=True)
    await field_node.start(NAMED)
    assert await conditions(field_node) == expected
    networks += [{"Name": name, "Id": name[-1]} for name in ("shared net", "team-2")]
    assert await conditions(field_node) == {"agent/agent-1": expected["agent/agent-1"]}
    networks += [{"Name": "first", "Id": "team-1"}]
    assert await conditions(field_node) == {}


@pytest.mark.parametrize("answer", ["fails", "silent"])
async def test_engine_that_cannot_tell_lacks_no_network(
    field_node: Daemon, field_engine: EngineProxy, answer: str
) -> None:
    gate = asyncio.Event()
    rules = {"fails": field_engine.fail, "silent": field_engine.stall(gate, before=True)}
    field_engine.rule(NETWORKS, rules[answer], always=True)
    await field_node.start(NAMED)
    assert await conditions(field_node) == {}
    gate.set()
