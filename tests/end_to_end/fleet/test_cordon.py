"""Cordons of nodes at real gateways, with and without etcd."""

import asyncio
import functools
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentd.core.access import Caller, Role
from end_to_end.fleet.fleet_world import GatewayProgram, World
from support import fork_server
from support.waiting import until

READ = {"Agentd-Caller": Caller("eye", Role.READ).to_text()}
TEAM = {"Agentd-Caller": Caller("team", Role.AGENT, frozenset({"agent-2"})).to_text()}
REASON = {"reason": "new disk"}
PAGE = Path(__file__).parents[3] / "docs/how-to/maintain-a-node.md"
BIN = Path(sys.executable).parent


async def cordon(gateway: GatewayProgram, node: str) -> None:
    answer = await gateway.call("POST", f"/v1/nodes/{node}/cordon", REASON)
    assert answer.status == 200, answer.content
    shown = answer.json["cordon"]
    assert (shown["reason"], shown["by"]) == ("new disk", gateway.socket.stem)
    assert shown["since"].startswith("20")
    assert answer.json["state"] == "ready"
    again = await gateway.call("POST", f"/v1/nodes/{node}/cordon")
    assert (again.status, again.json["cordon"]) == (200, shown)


async def test_cordon_holds_at_all_gateways_and_over_restarts(world: World) -> None:
    await world.start_etcd()
    one, other = await world.start_nodes("none", "none")
    for node in (one, other):
        world.join(node)
    gateways = [world.gateway(), world.gateway()]
    for gateway in gateways:
        await gateway.until({one: "ready", other: "ready"})
    before = await gateways[0].create(kernel_id="before", placement={"nodes": [one]})
    assert before.status == 201
    await cordon(gateways[0], one)
    await until(lambda: gateways[1].get(f"/v1/nodes/{one}"), lambda node: node["cordon"])
    for number in range(6):
        created = await gateways[number % 2].create(kernel_id=f"k{number}")
        assert (created.status, created.json["node_id"]) == (201, other)
    for query in ("", "?dry_run=true"):
        body = {"command": ["true"], "placement": {"nodes": [one]}}
        refused = await gateways[1].call("POST", f"/v1/kernels{query}", body)
        assert (refused.status, refused.json["code"]) == (503, "NodeUnavailable")
        assert "cordoned: new disk" in refused.json["detail"]
    assert (await gateways[1].get("/v1/kernels/before"))["state"] == "running"
    # A repetition finds its kernel, and an ended one is not started again, now or after the cordon:
    # https://github.com/hashicorp/nomad/issues/19564
    stopped = await gateways[0].call("POST", "/v1/kernels/before/stop", {"timeout": 0})
    assert stopped.status == 200
    for gateway in gateways:
        again = await gateway.create(kernel_id="before", placement={"nodes": [one]})
        assert (again.status, again.json["state"]) == (200, "terminated")
    await gateways[1].stop()
    gateways[1].start()
    await gateways[1].until({one: "ready"})
    assert (await gateways[1].get(f"/v1/nodes/{one}"))["cordon"]["reason"] == "new disk"
    freed = await gateways[1].call("POST", f"/v1/nodes/{one}/uncordon")
    assert (freed.status, freed.json["cordon"]) == (200, None)
    again = await gateways[1].create(kernel_id="before", placement={"nodes": [one]})
    assert (again.status, again.json["state"]) == (200, "terminated")
    after = await gateways[1].create(placement={"nodes": [one]})
    assert after.status == 201, after.content


async def test_lost_node_is_cordoned_until_it_is_forgotten(world: World) -> None:
    await world.start_etcd()
    (node,) = await world.start_nodes("none")
    publisher, gateway = world.join(node), world.gateway()
    await gateway.until({node: "ready"})
    await publisher.stop(signal.SIGKILL)
    await gateway.until({node: "lost"})
    for path in ("cordon", "uncordon", "cordon"):
        answer = await gateway.call("POST", f"/v1/nodes/{node}/{path}")
        assert (answer.status, answer.json["state"]) == (200, "lost")
    publisher.start()
    await gateway.until({node: "ready"})
    assert (await gateway.get(f"/v1/nodes/{node}"))["cordon"]["reason"] == ""
    assert (await gateway.create()).json["code"] == "NodeUnavailable"
    await publisher.stop(signal.SIGKILL)
    await gateway.until({node: "lost"})
    assert (await gateway.call("DELETE", f"/v1/nodes/{node}")).status == 204
    publisher.start()
    await gateway.until({node: "ready"})
    assert (await gateway.get(f"/v1/nodes/{node}"))["cordon"] is None
    assert (await gateway.create()).status == 201


async def test_cordon_without_etcd_by_the_command_line(world: World) -> None:
    one, other = await world.start_nodes("none", "none")
    gateway = world.gateway(world.followed())
    await gateway.until({one: "ready", other: "ready"})
    await cordon(gateway, one)
    await gateway.stop()
    gateway.start()
    await gateway.until({one: "ready", other: "ready"})
    places = {(await gateway.create(kernel_id=f"k{n}")).json["node_id"] for n in range(6)}
    assert places == {other}

    async def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = ("agentctl", "--fleet", f"unix:{gateway.socket}", "fleet", "nodes", *words)
        return await asyncio.to_thread(fork_server.run, *command)

    listed = await run()
    rows = {row.split()[0]: row for row in listed.stdout.splitlines() if row.strip()}
    assert "ready,cordoned" in rows[one]
    assert "new disk" in rows[one]
    assert "cordoned" not in rows[other]
    assert "by gate" in (await run("-o", "wide")).stdout
    done = await run("uncordon", one, "-o", "json")
    assert (done.returncode, json.loads(done.stdout)["cordon"]) == (0, None), done.stderr
    done = await run("cordon", other, "--reason", "fans")
    assert (done.returncode, "ready,cordoned" in done.stdout) == (0, True), done.stderr
    assert (await gateway.create()).json["node_id"] == one
    unknown = await run("cordon", "nowhere")
    assert (unknown.returncode, "unknown node nowhere" in unknown.stderr) == (1, True)


@pytest.mark.parametrize("path", ["cordon", "uncordon"])
async def test_cordon_is_for_admins_and_known_nodes(world: World, path: str) -> None:
    (node,) = await world.start_nodes("none")
    gateway = world.gateway(world.followed())
    await gateway.until({node: "ready"})
    for caller in (READ, TEAM):
        answer = await gateway.call("POST", f"/v1/nodes/{node}/{path}", headers=caller)
        assert (answer.status, answer.json["code"]) == (403, "Forbidden")
    unknown = await gateway.call("POST", f"/v1/nodes/nowhere/{path}")
    assert (unknown.status, unknown.json["code"]) == (404, "UnknownNode")
    wrong = await gateway.call("POST", f"/v1/nodes/{node}/{path}", {"reason": 7})
    assert wrong.status == (422 if path == "cordon" else 200)
    assert (await gateway.get(f"/v1/nodes/{node}"))["cordon"] is None


async def test_page_about_maintenance_can_be_followed(world: World) -> None:
    one, other = await world.start_nodes("none", "none")
    gateway = world.gateway(world.followed())
    await gateway.until({one: "ready", other: "ready"})
    for name, node in (("a", one), ("b", one), ("c", other)):
        created = await gateway.create(kernel_id=name, placement={"nodes": [node]})
        assert created.status == 201, created.content
    await world.nodes[one].running(kernel_id="direct", command=["sleep", "1000"])
    text = PAGE.read_text().replace("node-1", one).replace("--timeout 60", "--timeout 0")
    steps = {
        title: re.findall(r"^ *\$ (agentctl .*)$", part, re.MULTILINE)
        for title, _, part in (part.partition("\n") for part in text.split("\n## "))
    }

    async def follow(title: str, *words: str, **address: str) -> list[str]:
        """Run the commands of a step that have these words; return their outputs."""
        environ = {"PATH": f"{BIN}:/usr/bin:/bin", **address}
        outputs = []
        for command in steps[title]:
            if all(word in command for word in words):
                run = functools.partial(subprocess.run, env=environ, stdout=-1, stderr=-2)
                done = await asyncio.to_thread(run, ["sh", "-c", command], text=True, check=False)
                assert done.returncode == 0, done.stdout
                outputs.append(done.stdout)
        return outputs

    at_gateway = {"AGENTCTL_FLEET": f"unix:{gateway.socket}"}
    at_node = {"AGENTD_SOCKET": f"{world.nodes[one].folder}/agentd.sock"}
    (cordoned,) = await follow("1. Cordon the node", **at_gateway)
    assert ("ready,cordoned" in cordoned, "new disk" in cordoned) == (True, True), cordoned
    listed, _removed = await follow("2. Drain the node", **at_gateway)
    assert {row.split()[0] for row in listed.splitlines()[2:]} == {"a", "b", "direct"}
    (left,) = await follow("2. Drain the node", "running", **at_gateway)
    assert len(left.splitlines()) == 2, left
    await world.nodes[one].stop()
    await gateway.until({one: "daemon-down"})
    await world.nodes[one].start()
    await gateway.until({one: "ready"})
    assert len(await follow("4. Bring it back", "doctor", **at_node)) == 1
    (listed,) = await follow("Find what was left", **at_gateway)
    assert ("ready,cordoned" in listed, "by gate" in listed) == (True, True), listed
    assert len(await follow("4. Bring it back", one, **at_gateway)) == 2
    assert (await gateway.get("/v1/kernels/back"))["node_id"] == one
    assert len(await follow("4. Bring it back", "rm back", **at_gateway)) == 1
