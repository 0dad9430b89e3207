"""Nodes that lie, addresses that change hands, and what somebody wrote into the store by hand."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from agentd.error_codes import ERROR_CODES
from agentd.http.streaming.websocket import MAX_FRAME
from agentd_fleet.nodes.calls import GATEWAY, NodeAnswerLost, Nodes
from agentd_fleet.store.etcd_client import EtcdClient
from agentd_fleet.store.etcd_store import EtcdStore
from agentd_fleet.store.etcd_transport import EtcdCredentials
from agentd_fleet.store.route import RouteUnreadable
from agentd_fleet.view.fleet_state import FleetState
from agentd_fleet.view.fleet_view import FleetNode
from agentd_fleet.view.reports import unreachable_reason
from end_to_end.fleet.fleet_world import GatewayProgram, World
from support.waiting import until
from support.web_server import served

SAID = {"schema": 1, "install_id": "i", "boot_id": "b", "version": "9"}
AGENTS = {"agent-1": {"cpu": "8", "mem": "1000000000"}}
TYPES = [{"name": "cpu", "kind": "count", "quantum": "1"}, {"name": "mem", "kind": "bytes",
         "quantum": "1"}]  # fmt: skip


class Liar:
    """A server in a node's place, with answers chosen by a test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: Any = lambda _: web.Response(text="<html>")
        self.asked: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path}")
        response = self.answers(request)
        response.headers["Agentd-Node"] = request.headers["Agentd-Node"]
        return response


@pytest.fixture
async def liar(folder: Path) -> AsyncIterator[Liar]:
    made = Liar(folder / "liar.sock")
    async with served(made.path, made.answer):
        yield made


async def tell(etcd: EtcdClient, node: str, url: str, agents: Any = AGENTS, **members: Any) -> None:
    report = {**SAID, "url": url, "agents": agents, "slot_types": TYPES, **members}
    await etcd.put(f"/agentd/main/nodes/{node}", msgspec.json.encode(report))
    await etcd.put(f"/agentd/main/free/{node}", msgspec.json.encode({"agents": agents}))


async def with_liar(world: World, liar: Liar) -> tuple[GatewayProgram, str]:
    await world.start_etcd()
    (honest,) = await world.start_nodes("none")
    world.join(honest)
    gateway = world.gateway(
        deadlines={"agentd_fleet.placement.attempts.PlacementTimeouts.retry_for_s": 1.0}
    )
    async with world.client() as etcd:
        await tell(etcd, "liar", f"unix:{liar.path}")
    await gateway.until({honest: "ready", "liar": "ready"})
    return gateway, honest


def problem(code: str, status: int, **members: Any) -> Any:
    content = {"code": code, "detail": "so", "status": status, **members}
    return lambda _: web.Response(body=json.dumps(content), status=status)


async def test_malformed_node_answers_affect_only_that_node(world: World, liar: Liar) -> None:
    gateway, honest = await with_liar(world, liar)
    only = {"placement": {"nodes": ["liar"]}}
    deep = '[{"a":' + "[" * 100_000
    for said in ("<html>", '{"a": 1}', "[1, 2]", "[{}]", '[{"kernel_id": 7}]', "[" * 9000, deep,
                 '[{"a": "\udcff"}]', '[{"a": 1e999}]'):  # fmt: skip
        content = said.encode(errors="surrogateescape")
        liar.answers = lambda _, content=content: web.Response(body=content)
        for path in ("/v1/kernels", "/v1/devices", "/v1/kernels?limit=1"):
            listed = await gateway.call("GET", path)
            assert listed.status == 200, (said[:20], listed.content)
    elsewhere = web.HTTPTemporaryRedirect("/v1/elsewhere")
    for answers, status, code in (
        (problem("NopeCode", 409), 502, "NopeCode"),
        (problem("Draining", 503, errors=[{}], headers=3, facts="x"), 503, "NodeUnavailable"),
        (problem("InsufficientResource", 409), 409, "InsufficientResource"),
        (problem("InvalidRequest", 422, errors=[{}, 1]), 422, "InvalidRequest"),
    ):
        liar.answers = answers
        refused = await gateway.create(**only)
        assert (refused.status, refused.json["code"]) == (status, code), refused.content
    liar.answers = lambda _: web.Response(status=307, headers=dict(elsewhere.headers))
    lost = await gateway.create(kernel_id="k1", **only)
    assert (lost.status, lost.json["kernel_id"]) == (503, "k1")
    assert not any("elsewhere" in asked for asked in liar.asked)
    assert (await gateway.create(placement={"nodes": [honest]})).status == 201


@pytest.mark.parametrize("said", ["<html>", "", "[1]", "7", "[" * 9000, '{"a": "\udcff"}'])
async def test_success_that_cannot_be_read_is_the_node_s_failure(
    world: World, liar: Liar, said: str
) -> None:
    gateway, honest = await with_liar(world, liar)
    content = said.encode(errors="surrogateescape")
    liar.answers = lambda _: web.Response(body=content)
    only = {"placement": {"nodes": ["liar"]}}
    for method, path, body in (
        ("GET", "/v1/kernels/x?node=liar", None),
        ("GET", "/v1/kernels/x/stats?node=liar", None),
        ("POST", "/v1/kernels/x/stop?node=liar", {}),
        ("DELETE", "/v1/kernels/x?node=liar", None),
        ("POST", "/v1/kernels?dry_run=true", only),
        ("POST", "/v1/kernels", only),
    ):
        answer = await gateway.call(method, path, body)
        assert answer.status == 503, (method, path, answer.content)
        assert "liar" in answer.json["detail"]
    assert "rpc.failed" not in gateway.log
    assert (await gateway.create(placement={"nodes": [honest]})).status == 201


@pytest.mark.parametrize(
    ("code", "times"),
    [("StateUnavailable", 1), ("ImageUnavailable", 1), ("ImageNotFound", 3), ("RuntimeFailure", 3)],
)
async def test_creates_that_fail_on_a_node_reach_the_next(
    world: World, liar: Liar, code: str, times: int
) -> None:
    gateway, honest = await with_liar(world, liar)
    little = {"agent-1": {"cpu": "1", "mem": "1000"}}  # so that it is asked first
    async with world.client() as etcd:
        await tell(etcd, "liar", f"unix:{liar.path}", little)
        await until(
            lambda: gateway.get("/v1/nodes/liar"),
            lambda value: value["agents"]["agent-1"]["cpu"]["free"] == "1",
        )
        liar.answers = problem(code, ERROR_CODES[code].status)
        for number in range(3):
            made = await gateway.create(slots={"cpu": 1}, placement={"policy": "pack"})
            assert (made.status, made.json["node_id"]) == (201, honest), (number, made.content)
        assert liar.asked.count("POST /v1/agents/agent-1/kernels") == times
        only = await gateway.create(slots={"cpu": 1}, placement={"nodes": ["liar"]})
        assert (only.status, only.json["code"]) == (ERROR_CODES[code].status, code)
        assert only.json["classes"] == [{"reason": f"said {code}", "count": 1, "nodes": ["liar"]}]


async def test_invalid_names_are_neither_nodes_nor_routes(world: World, liar: Liar) -> None:
    servers = await world.start_etcd()
    route = {"node_id": "liar", "agent_id": "agent-1", "request_hash": "x", "owner": "o"}
    async with EtcdClient(EtcdCredentials(servers.endpoints)) as etcd:
        state = FleetState()
        store = EtcdStore(etcd, "main", state)
        for node in ("a/liar", "..", ""):
            await tell(etcd, node, f"unix:{liar.path}")
        await tell(etcd, "liar", f"unix:{liar.path}", {"../../x": {"cpu": "1"}})
        for changes in ({"node_id": "../x"}, {"agent_id": "a/b"}, {"kernel_id": "k2"}):
            value = {**route, "kernel_id": "k1", **changes}
            await etcd.put("/agentd/main/routes/k1", msgspec.json.encode(value))
            with pytest.raises(RouteUnreadable):
                await store.route("k1")
        for kernel_id in ("../nodes/liar", "", ".."):
            with pytest.raises(ValueError, match="invalid name"):
                await store.route(kernel_id)
        following = asyncio.create_task(store.run())
        await until(lambda: state.node("liar") is not None, within_s=10)
        await tell(etcd, "b/liar", f"unix:{liar.path}")
        await tell(etcd, "last", f"unix:{liar.path}")
        await until(lambda: state.node("last") is not None, within_s=10)
        following.cancel()
    assert sorted(state.view.nodes) == ["last", "liar"]
    assert "invalid agent id" in state.view.nodes["liar"].exclusion_reason


async def test_a_path_within_a_name_reaches_no_other_call(world: World, liar: Liar) -> None:
    gateway, honest = await with_liar(world, liar)
    for path, code in (
        ("/v1/kernels/..%2Fnodes%2Fliar", "UnknownKernel"),
        ("/v1/kernels/x%2Fy/stats", "UnknownKernel"),
        ("/v1/nodes/..%2Fliar", "UnknownNode"),
        (f"/v1/nodes/{honest}/kernels%2F..%2F..%2F..%2Fmetrics", "InvalidRequest"),
        (f"/v1/nodes/{honest}/kernels//k1", "InvalidRequest"),
        ("/v1/nodes/liar/..%2F..%2Flivez", "InvalidRequest"),
    ):
        answer = await gateway.call("GET", path)
        assert (answer.status, answer.json["code"]) == (
            422 if code == "InvalidRequest" else 404, code
        ), path  # fmt: skip
    assert not any("livez" in asked for asked in liar.asked)


async def test_an_address_that_another_node_has_now_is_not_believed(world: World) -> None:
    """A machine's address is given to another: what that one lacks, the first may have."""
    await world.start_etcd()
    first, second, third = await world.start_nodes("none", "none", "none")
    for node in (second, third):
        world.join(node)
    gateway = world.gateway(gateway='policy = "pack"\n')
    little = {"agent-1": {"cpu": "1", "mem": "1000"}}  # so that it is asked first
    moved = f"unix:{world.nodes[third].folder}/agentd.sock"
    only = {"kernel_id": "k1", "slots": {"cpu": 1}, "placement": {"nodes": [first, second]}}
    async with world.client() as etcd:
        await tell(etcd, first, f"unix:{world.nodes[first].folder}/agentd.sock", little)
        await gateway.until(dict.fromkeys((first, second, third), "ready"))
        made = await gateway.create(**only)
        assert (made.status, made.json["node_id"]) == (201, first)
        await tell(etcd, first, moved, little)
        await until(
            lambda: gateway.get(f"/v1/nodes/{first}"),
            lambda value: value["url"] == moved,
            within_s=10,
        )
        again = await gateway.create(**only)
        assert (again.status, again.json["code"]) == (503, "OutcomeUnknown")
        assert (await gateway.call("GET", "/v1/kernels/k1")).status == 503
    assert await world.census() == {"k1": [first]}


def liar_in(folder: Path) -> FleetNode:
    return FleetNode("node-1", {}, {}, url=f"unix:{folder}/liar.sock")


async def test_exec_reaches_only_its_node(folder: Path) -> None:
    asked = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        if request.path == "/moved":
            return web.Response(status=307, headers={"Location": "/exec"})
        socket = web.WebSocketResponse()
        socket.headers["Agentd-Node"] = "node-1" if request.path == "/right" else "node-2"
        await socket.prepare(request)
        await socket.close()
        return socket

    async with served(folder / "liar.sock", answer), Nodes(FleetState()) as nodes:
        node = liar_in(folder)
        async with await nodes.open_websocket(node, GATEWAY, "/right") as socket:
            assert not socket.closed
        for path in ("/moved", "/exec"):
            with pytest.raises(NodeAnswerLost, match="another server answers"):
                await nodes.open_websocket(node, GATEWAY, path)
    assert asked == ["/right", "/moved", "/exec"]


async def test_an_answer_without_end_is_given_up(folder: Path) -> None:
    has_ended = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Agentd-Node": "node-1"})
        await response.prepare(request)
        try:
            while True:
                await response.write(bytes(1 << 20))
        finally:
            has_ended.set()

    async with served(folder / "liar.sock", answer), Nodes(FleetState()) as nodes:
        with pytest.raises(NodeAnswerLost, match="exceeds 64 MiB"):
            await nodes.call(liar_in(folder), GATEWAY, "GET", "/v1/kernels")
        async with asyncio.timeout(20):
            await has_ended.wait()


async def test_a_frame_without_end_is_given_up(folder: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        socket.headers["Agentd-Node"] = "node-1"
        await socket.prepare(request)
        with contextlib.suppress(ConnectionError):
            await socket.send_bytes(bytes(MAX_FRAME + 1))
            await socket.receive()
        return socket

    async with served(folder / "liar.sock", answer), Nodes(FleetState()) as nodes:
        socket = await nodes.open_websocket(liar_in(folder), GATEWAY, "/exec")
        assert socket is not None
        assert (await socket.receive()).type is aiohttp.WSMsgType.ERROR
        assert socket.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG


@pytest.mark.parametrize(
    ("url", "is_called"),
    [("https://node-1:6001", True), ("https://[::1]:6001", True), ("http://127.0.0.1:1", True),
     ("unix:/run/agentd/agentd.sock", True), ("http://localhost:6001", True), ("", False),
     ("http://node-1:6001", False), ("http://127.evil.com", False), ("https://n:600111", False),
     ("https://n:abc", False), ("https://user@n:1", False), ("https://n/path", False),
     ("ftp://n:1", False), ("https://", False), ("https://n:1\r\nX: y", False),
     ("unix:/a\nb", False), ("unix:relative", False)],
)  # fmt: skip
def test_a_token_goes_to_addresses_that_are_one_and_are_safe(url: str, is_called: bool) -> None:
    assert (unreachable_reason(url) == "") is is_called
