"""Networks that the configuration names and the engine lacks: shown before a create needs one."""

import asyncio
import re

import pytest

from runtimes.field import engine_dialects as dialects
from support.daemon import Daemon
from support.engine_proxy import EngineProxy

NETWORKS = """allowed-networks = ["host", "container:db", "shared net"]
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
    field_engine.rule("GET .*/networks/", dialects.answers({"message": "no"}, 404), always=True)
    await field_node.start(NETWORKS)
    expected = {
        about: f"{key}: the engine has no network {name!r}"
        for name, (about, key) in MISSING.items()
    }
    assert await conditions(field_node) == expected
    asked = {line.partition("/networks/")[2] for line in field_engine.asked if "/networks/" in line}
    assert {re.split(r"[ ?]", name)[0] for name in asked} == {"shared%20net", "team-1", "team-2"}
    field_engine.clear()
    field_engine.rule("GET .*/networks/team-1", dialects.answers({"message": "no"}, 404))
    field_engine.rule("GET .*/networks/", dialects.answers({"Name": "x"}, 200), always=True)
    assert await conditions(field_node) == {"agent/agent-1": expected["agent/agent-1"]}
    assert await conditions(field_node) == {}


@pytest.mark.parametrize("answer", ["fails", "silent"])
async def test_engine_that_cannot_tell_lacks_no_network(
    field_node: Daemon, field_engine: EngineProxy, answer: str
) -> None:
    gate = asyncio.Event()
    rules = {"fails": field_engine.fail, "silent": field_engine.stall(gate, before=True)}
    field_engine.rule("GET .*/networks/", rules[answer], always=True)
    await field_node.start(NETWORKS)
    assert await conditions(field_node) == {}
    gate.set()
