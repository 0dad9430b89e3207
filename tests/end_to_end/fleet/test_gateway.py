"""One gateway over real nodes with different plugins, without etcd."""

import asyncio
import signal
from functools import partial

import pytest

from agentd.core.access import Caller, Role
from end_to_end.fleet.fleet_world import SLEEP, GatewayProgram, World
from support.waiting import until

TEAM = {"Agentd-Caller": Caller("team-x", Role.AGENT, frozenset({"agent-2"})).to_text()}
READ = {"Agentd-Caller": Caller("eye", Role.READ).to_text()}


@pytest.fixture
async def fleet(world: World) -> tuple[World, GatewayProgram, list[str]]:
    nodes = await world.start_nodes("cuda", "rocm", "none")
    gateway = world.gateway(world.followed())
    await gateway.until(dict.fromkeys(nodes, "ready"))
    return world, gateway, nodes


async def test_slot_types_merge_with_exact_sums(fleet) -> None:
    world, gateway, (cuda, _rocm, bare) = fleet
    names = {slot["name"] for slot in await gateway.get("/v1/slot-types")}
    assert names == {"cpu", "mem", "cuda.device", "rocm.device"}
    stats = await gateway.get("/v1/stats")
    assert stats["slots"]["cuda.device"] == {"capacity": "4", "allocated": "0", "free": "4"}
    assert stats["slots"]["cpu"] == {"capacity": "24", "allocated": "0", "free": "24"}
    assert stats["nodes"][bare]["rocm.device"] == {"capacity": "0", "allocated": "0", "free": "0"}
    made = await gateway.create(kernel_id="k1", slots={"cuda.device": 3, "rocm.device": 0})
    assert (made.status, made.json["node_id"], made.json["state"]) == (201, cuda, "running")
    assert made.headers["Fleet-Revision"].isdigit()
    await gateway.until_free(cuda, "cuda.device", "1")
    stats = await gateway.get("/v1/stats")
    shared = {"capacity": "4", "allocated": "3", "free": "1"}  # the agents share the devices
    assert stats["slots"]["cuda.device"] == stats["nodes"][cuda]["cuda.device"] == shared
    mine = await gateway.get("/v1/stats?agent=agent-1&agent=agent-2")
    assert mine["slots"]["cuda.device"] == shared
    assert await world.census() == {"k1": [cuda]}


async def test_an_unknown_slot_is_refused_before_any_node_is_asked(fleet) -> None:
    world, gateway, nodes = fleet
    before = [world.nodes[node].log.count("rpc.call") for node in nodes]
    refused = await gateway.create(slots={"tpu.chip": 1})
    assert (refused.status, refused.json["code"]) == (422, "UnsupportedResource")
    assert refused.json["known_slots"] == ["cpu", "cuda.device", "mem", "rocm.device"]
    assert [world.nodes[node].log.count("rpc.call") for node in nodes] == before
    assert (await gateway.create(slots={"tpu.chip": 0, "cpu": 1})).status == 201


async def test_a_create_that_fails_leaves_its_id(fleet) -> None:
    _, gateway, _ = fleet
    missing = await gateway.create(kernel_id="k1", command=["/nowhere"])
    assert (missing.status, missing.json["code"]) == (422, "CommandNotFound")
    strange = await gateway.create(kernel_id="k1", placement={"nodes": ["nowhere"]})
    assert (strange.status, strange.json["code"]) == (404, "UnknownNode")
    assert (await gateway.create(kernel_id="k1")).status == 201


async def test_the_same_order_is_one_kernel_and_another_one_a_conflict(fleet) -> None:
    world, gateway, _ = fleet
    first = await gateway.create(kernel_id="once", slots={"cpu": 1})
    again = await gateway.create(kernel_id="once", slots={"cpu": 1})
    other = await gateway.create(kernel_id="once", slots={"cpu": 2})
    assert (first.status, again.status, other.status) == (201, 200, 409)
    assert again.json["node_id"] == first.json["node_id"]
    assert other.json["code"] == "KernelConflict"
    together = await asyncio.gather(*(gateway.create(kernel_id="many") for _ in range(8)))
    assert sorted(answer.status for answer in together) == [200] * 7 + [201]
    assert {k: len(v) for k, v in (await world.census()).items()} == {"once": 1, "many": 1}


async def test_attempt_of_a_kernel_holds_in_the_fleet(fleet) -> None:
    _, gateway, _ = fleet
    body = {"kernel_id": "once", "attempt": "00000000000000aa"}
    first = await gateway.create(**body)
    assert first.status == 201
    for again in (body, {"kernel_id": "once"}):
        assert (await gateway.create(**again)).status == 200
    other = await gateway.create(kernel_id="once", attempt="00000000000000bb")
    assert (other.status, other.json["code"]) == (409, "KernelConflict")
    assert "another attempt created it; use another id" in other.json["detail"]
    together = await asyncio.gather(
        *(gateway.create(kernel_id="many", attempt=a * 16) for a in "0101010101")
    )
    assert sorted(answer.status for answer in together) == [200] * 4 + [201] + [409] * 5
    node = first.json["node_id"]
    assert (await gateway.call("DELETE", f"/v1/kernels/once?node={node}&timeout=0")).status == 204
    assert (await gateway.create(kernel_id="once", attempt="00000000000000bb")).status == 201


async def test_only_a_client_reads_the_end_of_a_kernel_with_remove(fleet) -> None:
    world, gateway, (_, _, bare) = fleet
    node, path = world.nodes[bare], "/v1/kernels/k1"
    await node.stop()
    node.deadlines = {"agentd.services.kernels.retention.REMOVE_DELAY_S": 0.2}
    await node.start()
    node.deadlines = {}
    await gateway.until({bare: "ready"})
    body = {"kernel_id": "k1", "command": ["true"], "remove": True, "attempt": "0" * 16}
    body["placement"] = {"nodes": [bare], "agents": ["agent-1"]}
    assert (await gateway.create(**body)).status == 201
    listed = partial(node.get, "/v1/kernels?state=terminated")
    await until(listed, lambda rows: len(rows) == 1, text="an ended kernel")
    for _ in range(20):  # longer than the delay: a repetition is the gateway's own look
        assert (await gateway.create(**body)).status == 200
        assert (await node.call("GET", path, headers=TEAM)).status == 404
        await node.get(path)  # by another caller than the one that the gateway named
        await asyncio.sleep(0.02)
    assert (await gateway.get(path))["state"] == "terminated"
    await until(lambda: gateway.call("GET", path), lambda answer: answer.status == 404)
    assert (await gateway.create(**{**body, "attempt": "1" * 16})).status == 201


async def test_signal_reaches_a_kernel_by_its_route(fleet) -> None:
    _world, gateway, (_, rocm, _) = fleet
    script = "trap 'exit 9' USR1; echo ready; while :; do sleep 0.05; done"
    there = {"nodes": [rocm], "agents": ["agent-1"]}
    placed = {"command": ["sh", "-c", script], "placement": there}
    mine = {"command": ["sleep", "1000"], "placement": {"agents": ["agent-2"]}}
    await gateway.create(kernel_id="k1", **placed)
    assert (await gateway.create(TEAM, kernel_id="mine", **mine)).status == 201
    logs = "/v1/kernels/k1/logs"
    await until(lambda: gateway.call("GET", logs), lambda answer: answer.content == b"ready\n")
    usr1, path = {"signal": "USR1"}, "/v1/kernels/k1/signal"
    assert (await gateway.call("POST", path, usr1, headers=TEAM)).json["code"] == "UnknownKernel"
    of_reader = await gateway.call("POST", "/v1/kernels/mine/signal", usr1, headers=READ)
    assert of_reader.status == 403
    assert (await gateway.call("POST", path, {"signal": "STOP"})).status == 422
    sent = await gateway.call("POST", path, usr1)
    assert (sent.status, sent.content) == (204, b"")
    ended = await until(
        lambda: gateway.get("/v1/kernels/k1"), lambda kernel: kernel["state"] == "terminated"
    )
    assert ended["exit_code"] == 9
    assert (await gateway.call("POST", path, usr1)).json["code"] == "KernelConflict"
    direct = f"/v1/nodes/{rocm}/kernels/k1/signal"
    assert (await gateway.call("POST", direct, usr1)).json["code"] == "KernelConflict"


async def test_a_kernel_is_looked_at_stopped_and_removed_where_it_is(fleet) -> None:
    world, gateway, (cuda, rocm, _) = fleet
    command = ["sh", "-c", "echo hello; exec sleep 1000"]
    body = {"command": command, "placement": {"nodes": [rocm]}, "labels": {"job": "x"}}
    made = await gateway.create(kernel_id="k1", **body)
    assert made.json["node_id"] == rocm
    assert (await gateway.get("/v1/kernels/k1"))["labels"] == {"job": "x"}
    log = await until(
        lambda: gateway.call("GET", "/v1/kernels/k1/logs"),
        lambda value: value.content == b"hello\n",
        within_s=10,
    )
    assert log.headers["X-Accel-Buffering"] == "no", "no proxy keeps it back"
    assert log.headers["Log-Position"] == "0"
    assert log.headers["Log-Kernel"].endswith("~k1")
    log = await gateway.call("GET", "/v1/kernels/k1/logs?from=2")
    assert (log.headers["Log-Position"], log.content) == ("2", b"llo\n")
    assert (await gateway.call("POST", "/v1/kernels/k1/stop", {"timeout": 0})).status == 200
    assert (await gateway.call("DELETE", "/v1/kernels/k1?timeout=0")).status == 204
    assert (await gateway.call("GET", "/v1/kernels/k1")).json["code"] == "UnknownKernel"
    await world.nodes[cuda].running(kernel_id="direct", **SLEEP)
    listed = await gateway.get("/v1/kernels")
    assert [(k["kernel_id"], k["node_id"]) for k in listed] == [("direct", cuda)]
    assert (await gateway.call("GET", "/v1/kernels/direct")).status == 404
    assert (await gateway.get(f"/v1/kernels/direct?node={cuda}"))["state"] == "running"
    assert (await gateway.call("DELETE", f"/v1/kernels/direct?node={cuda}&timeout=0")).status == 204


async def test_roles_hold_in_the_fleet_and_nodes_see_the_caller(fleet) -> None:
    _world, gateway, (cuda, *_) = fleet
    mine = await gateway.create(TEAM, kernel_id="mine", slots={"cuda.device": 1})
    assert (mine.json["agent_id"], mine.json["created_by"]) == ("agent-2", "team-x")
    away = await gateway.create(kernel_id="theirs", placement={"agents": ["agent-1"]})
    assert away.status == 201
    for path in ("/v1/kernels/theirs", "/v1/kernels/theirs/logs"):
        assert (await gateway.call("GET", path, headers=TEAM)).json["code"] == "UnknownKernel"
    taken = await gateway.create(TEAM, kernel_id="theirs")
    assert (taken.status, taken.json["detail"]) == (409, "kernel theirs already exists")
    assert [k["kernel_id"] for k in await gateway.get("/v1/kernels", **TEAM)] == ["mine"]
    agents = {a for node in await gateway.get("/v1/nodes", **TEAM) for a in node["agents"]}
    assert agents == {"agent-2"}
    assert (await gateway.get("/v1/stats", **TEAM))["slots"]["cuda.device"]["capacity"] == "4"
    forbidden = await gateway.create(TEAM, placement={"agents": ["agent-1"]})
    assert forbidden.json["code"] == "UnknownAgent"
    assert (await gateway.create(READ)).json["code"] == "Forbidden"
    assert (await gateway.call("GET", "/v1/kernels/mine/logs", headers=READ)).status == 403
    drain = f"/v1/nodes/{cuda}/devices/cuda/cuda0/drain"
    assert (await gateway.call("POST", drain, headers=TEAM)).status == 403
    assert (await gateway.call("POST", drain)).json["state"] == "drained"
    assert (await gateway.call("DELETE", "/v1/slot-types/cuda.device", headers=TEAM)).status == 403


async def test_a_node_that_goes_and_comes_back(fleet) -> None:
    world, gateway, (cuda, rocm, _bare) = fleet
    await gateway.create(kernel_id="k1", slots={"rocm.device": 1})
    await world.nodes[rocm].stop(signal.SIGKILL)
    await gateway.until({rocm: "daemon-down", cuda: "ready"}, within_s=3)
    assert (await gateway.create(slots={"rocm.device": 1})).status == 409
    assert {s["name"] for s in await gateway.get("/v1/slot-types")} >= {"rocm.device"}
    away = await gateway.call("GET", "/v1/kernels/k1")
    assert (away.status, away.json["code"]) == (503, "NodeUnavailable")
    lists = await gateway.call("GET", "/v1/kernels")
    assert lists.headers["Fleet-Missing"] == rocm
    assert [(k["kernel_id"], k["state"]) for k in lists.json] == [("k1", "unknown")]
    await world.nodes[rocm].start()
    await gateway.until({rocm: "ready"})
    assert (await gateway.get("/v1/kernels/k1"))["state"] == "running"


async def test_a_gateway_that_starts_again_knows_routes_and_slot_types(fleet) -> None:
    world, gateway, (cuda, rocm, _bare) = fleet
    await gateway.create(kernel_id="k1", slots={"rocm.device": 1})
    await gateway.stop(signal.SIGKILL)
    await world.nodes[rocm].stop()
    gateway.deadlines = {"agentd_fleet.store.sqlite_store.FIRST_READINGS_S": 2.0}
    gateway.start()
    await gateway.until({cuda: "ready", rocm: "lost"})
    assert {s["name"] for s in await gateway.get("/v1/slot-types")} >= {"rocm.device"}
    assert (await gateway.get("/v1/kernels/k1"))["state"] == "unknown"
    assert (await gateway.call("DELETE", f"/v1/nodes/{rocm}")).status == 204
    assert (await gateway.call("GET", "/v1/kernels/k1")).json["code"] == "UnknownKernel"
    assert (await gateway.call("DELETE", "/v1/slot-types/rocm.device")).status == 204
    async with asyncio.timeout(10):  # before, the node that is away may yet come
        while (refused := await gateway.create(slots={"rocm.device": 1})).status == 503:
            await asyncio.sleep(0.05)
    assert refused.json["code"] == "UnsupportedResource"
    kept = await gateway.call("DELETE", "/v1/slot-types/cuda.device")
    assert (kept.status, kept.json["code"]) == (409, "SlotTypeInUse")


async def test_node_calls_are_proxied_unchanged(fleet) -> None:
    _, gateway, (cuda, *_) = fleet
    devices = await gateway.get(f"/v1/nodes/{cuda}/devices")
    assert {d["id"] for d in devices if d["device_name"] == "cuda"} == {
        "cuda0", "cuda1", "cuda2", "cuda3",
    }  # fmt: skip
    assert {d["node_id"] for d in await gateway.get("/v1/devices")} == {
        node["id"] for node in await gateway.get("/v1/nodes")
    }
    refused = await gateway.call("POST", f"/v1/nodes/{cuda}/agents/agent-1/kernels", SLEEP)
    assert (refused.status, refused.json["code"]) == (422, "InvalidRequest")
    assert (await gateway.call("GET", f"/v1/nodes/{cuda}/nothing")).status == 404
    assert (await gateway.call("GET", "/v1/nodes/nowhere/devices")).json["code"] == "UnknownNode"
    text = (await gateway.call("GET", "/metrics")).content.decode()
    assert 'agentd_fleet_nodes{state="ready"} 3.0' in text
    assert 'agentd_fleet_slot_capacity{slot="cuda.device"} 4.0' in text
    document = await gateway.get("/v1/openapi.json")
    assert "/v1/kernels" in document["paths"]


async def test_agent_of_a_claim_alone_refuses_a_create_from_it(fleet) -> None:
    """Another agent of the node, which cannot know what is left of it, hides no refusal."""
    world, gateway, _ = fleet
    name, node = next((name, node) for name, node in world.nodes.items() if "cuda" in name)
    claim = {"claim_id": "c1", "slots": {"cuda.device": 1}, "holder": {"name": "x"}}
    assert (await node.call("POST", "/v1/agents/agent-1/claims", claim)).status == 201
    body = {"claim": "c1", "keep_claim": True, "placement": {"nodes": [name]}}
    assert (await gateway.create(**body)).status == 201
    for path in ("/v1/kernels", "/v1/kernels?dry_run=true"):
        refused = await gateway.call("POST", path, {**SLEEP, **body})
        assert (refused.status, refused.json["code"]) == (409, "InsufficientResource")
        assert "nothing is left of claim c1" in refused.json["detail"]
