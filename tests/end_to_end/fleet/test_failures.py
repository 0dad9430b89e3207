"""Failures in a fleet: each row of the table, with real parts."""

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest

from agentd_fleet.store.etcd_client import EtcdClient
from agentd_fleet.store.etcd_transport import EtcdCredentials, EtcdRefused, EtcdUnavailable
from end_to_end.fleet.fleet_world import GatewayProgram, World
from support.waiting import until

SOON_S = 1.0 if not os.environ.get("AGENTD_SOAK") else 0.3


async def joined(
    world: World, *kinds: str, deadlines: Mapping[str, float] | None = None, **options: Any
) -> tuple[GatewayProgram, list[str]]:
    """A fleet in etcd whose nodes have all joined, as one gateway sees it."""
    await world.start_etcd(**options)
    nodes = await world.start_nodes(*kinds)
    for node in nodes:
        world.join(node, deadlines=deadlines)
    gateway = world.gateway(deadlines=deadlines)
    await gateway.until(dict.fromkeys(nodes, "ready"))
    return gateway, nodes


async def test_nodes_join_and_all_gateways_see_the_same(world: World) -> None:
    gateway, (cuda, rocm) = await joined(world, "cuda", "rocm")
    other = world.gateway()
    await other.until({cuda: "ready", rocm: "ready"})
    made = await gateway.create(kernel_id="k1", slots={"rocm.device": 2})
    assert (made.status, made.json["node_id"]) == (201, rocm)
    await other.until_free(rocm, "rocm.device", "0")
    assert (await other.get("/v1/kernels/k1"))["node_id"] == rocm
    assert (await other.create(kernel_id="k1", slots={"rocm.device": 2})).status == 200
    for one in (gateway, other):
        assert {t["name"] for t in await one.get("/v1/slot-types")} == {
            "cpu", "mem", "cuda.device", "rocm.device",
        }  # fmt: skip
        assert (await one.get("/v1/stats"))["slots"]["rocm.device"]["allocated"] == "2"
    assert (await other.call("DELETE", "/v1/kernels/k1?timeout=0")).status == 204
    assert (await gateway.call("GET", "/v1/kernels/k1")).status == 404


async def test_gateway_shows_the_last_view_without_etcd(world: World) -> None:
    silence = {"agentd_fleet.store.etcd_store.SILENCE_S": 1.0}
    gateway, (cuda,) = await joined(world, "cuda", is_own=True, deadlines=silence)
    assert world.etcd is not None
    await gateway.create(kernel_id="k1")
    world.etcd.pause(0)
    await until(
        lambda: gateway.call("GET", "/v1/nodes"),
        lambda value: "Fleet-Stale" in value.headers,
        within_s=30,
    )
    assert await gateway.states() == {cuda: "ready"}
    assert (await gateway.call("GET", "/readyz")).status == 503
    refused = await gateway.create()
    assert refused.status == 503
    assert "without a current view of the fleet" in refused.json["detail"]
    assert (await world.nodes[cuda].get("/v1/kernels/k1"))["state"] == "running"
    world.etcd.resume(0)
    await until(
        lambda: gateway.create(kernel_id="k2"),
        lambda value: value.status in (200, 201),
        within_s=30,
    )
    await gateway.until({cuda: "ready"})
    assert (await gateway.call("GET", "/readyz")).status == 200


async def test_a_member_of_three_that_dies_is_not_noticed(world: World) -> None:
    gateway, _nodes = await joined(world, "cuda", count=3)
    assert world.etcd is not None
    for member in range(3):
        await world.etcd.kill(member)
        made = await gateway.create(kernel_id=f"k{member}")
        async with asyncio.timeout(30):
            while made.status == 503:  # while the members choose another leader
                await asyncio.sleep(0.2)
                made = await gateway.create(kernel_id=f"k{member}")
        assert made.status in (200, 201), made.content
        await world.etcd.restart(member)
    assert all(len(nodes) == 1 for nodes in (await world.census()).values())


async def test_a_node_that_is_lost_keeps_its_kernels(world: World) -> None:
    gateway, (cuda, rocm) = await joined(world, "cuda", "rocm")
    await gateway.create(kernel_id="k1", slots={"rocm.device": 1})
    publisher = world.programs[1]
    os.kill(publisher.pid, signal.SIGSTOP)
    await gateway.until({rocm: "lost", cuda: "ready"}, within_s=15)
    assert (await gateway.get("/v1/kernels/k1"))["state"] == "unknown"
    assert (await gateway.create(kernel_id="k1", slots={"rocm.device": 1})).status in (200, 503)
    assert (await gateway.create(slots={"rocm.device": 1})).status == 409
    assert (await gateway.get("/v1/stats"))["slots"]["rocm.device"]["capacity"] == "0"
    assert await world.census() == {"k1": [rocm]}
    os.kill(publisher.pid, signal.SIGCONT)
    await gateway.until({rocm: "ready"}, within_s=15)
    assert (await gateway.get("/v1/kernels/k1"))["state"] == "running"
    await publisher.stop(signal.SIGKILL)
    publisher.start()  # within the lease: nobody notices
    await gateway.until({rocm: "ready"})


async def test_stopped_daemon_is_reported_at_once(world: World) -> None:
    patience = {"agentd_fleet.nodes.reader.PROBE_TIMEOUT_S": 1.0}
    gateway, (cuda,) = await joined(world, "cuda", deadlines=patience)
    await world.nodes[cuda].stop(signal.SIGKILL)
    await gateway.until({cuda: "daemon-down"}, within_s=SOON_S)
    await world.nodes[cuda].start()
    await gateway.until({cuda: "ready"})
    process = world.nodes[cuda].process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    await gateway.until({cuda: "daemon-down"}, within_s=15)
    process.send_signal(signal.SIGCONT)
    await gateway.until({cuda: "ready"})


async def test_of_two_nodes_with_one_id_the_second_is_refused(world: World) -> None:
    gateway, (cuda, rocm) = await joined(world, "cuda", "rocm")
    twin = world.nodes[rocm]
    await world.programs[1].stop()
    await gateway.until({rocm: "lost"}, within_s=15)
    await twin.stop()
    own, twin.node = twin.node, cuda
    text = twin.config_file.read_text()
    twin.config_file.write_text(text.replace(f'id = "{own}"', f'id = "{cuda}"'))
    # both cannot hold the machine's lock of the node id, so the first is stopped, not its publisher
    await world.nodes[cuda].stop()
    await twin.start()
    second = world.join(rocm)
    await second.until_logged("is taken by")
    assert str(world.nodes[cuda].folder) in second.log
    assert str(twin.folder) in second.log
    first = f"unix:{world.nodes[cuda].folder}/agentd.sock"
    assert (await gateway.get(f"/v1/nodes/{cuda}"))["url"] == first
    await world.programs[0].stop(signal.SIGKILL)  # the first is gone for good: its id is free
    await until(
        lambda: gateway.get(f"/v1/nodes/{cuda}"), lambda value: str(twin.folder) in value["url"]
    )
    await twin.stop()
    twin.node = own
    twin.config_file.write_text(text)


async def test_reinstalled_node_keeps_its_id_without_kernels(world: World) -> None:
    gateway, (cuda,) = await joined(world, "cuda")
    await gateway.create(kernel_id="k1")
    await world.nodes[cuda].call("DELETE", "/v1/kernels/k1?timeout=0")
    first = world.programs[0]
    await first.stop()
    text = first.file.read_text().replace("install-", "anew-")
    first.file.write_text(text)
    first.start()
    await first.until_logged("node.published", 2)
    await gateway.until({cuda: "ready"})
    assert (await gateway.call("GET", "/v1/kernels/k1")).json["code"] == "UnknownKernel"
    assert (await gateway.create(kernel_id="k1", slots={"cpu": 2})).status == 201


async def fill(etcd: EtcdClient) -> None:
    for number in range(200):
        await etcd.put(f"/filler/{number}", b"x" * 200_000)


async def test_a_full_disk_at_etcd_refuses_creates_and_nothing_else(world: World) -> None:
    gateway, (cuda,) = await joined(world, "cuda", quota_bytes=4 * 2**20)
    await gateway.create(kernel_id="k1")
    async with world.client() as etcd:
        with pytest.raises(EtcdUnavailable, match="space"):
            await fill(etcd)
    refused = await gateway.create()
    assert (refused.status, refused.json["code"]) == (503, "FleetStoreUnavailable")
    assert "space" in refused.json["detail"]
    assert (await gateway.get("/v1/kernels/k1"))["state"] == "running"
    assert await gateway.states() == {cuda: "ready"}


async def test_fleets_in_one_etcd_are_separate(world: World) -> None:
    servers = await world.start_etcd(is_own=True)
    (cuda,) = await world.start_nodes("cuda")
    mine = (f"/agentd/main/nodes/{cuda}", f"/agentd/main/free/{cuda}")
    await servers.require_logins(
        "secret:ü", node=mine, gate=("/agentd/main/",), other=("/agentd/other/",)
    )

    def kept_in(user: str, name: str = "main") -> str:
        return world.kept_as(user, "secret:ü", name)

    world.join(cuda, kept_in=kept_in("node"))
    gateway, other = world.gateway(kept_in("gate")), world.gateway(kept_in("other", "other"))
    await gateway.until({cuda: "ready"})
    assert (await gateway.create(kernel_id="k1")).status == 201
    await other.until({})
    assert await other.states() == {}
    stranger = world.join(cuda, kept_in=kept_in("node", "other"))
    await stranger.until_logged("permission denied")
    async with EtcdClient(EtcdCredentials(servers.endpoints, "node", "secret:ü")) as etcd:
        for key in ("nodes/another", "routes/k1", "slot-types/cuda.device"):
            with pytest.raises(EtcdRefused, match="permission denied"):
                await etcd.put(f"/agentd/main/{key}", json.dumps({}).encode())
