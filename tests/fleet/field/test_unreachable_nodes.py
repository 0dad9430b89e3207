"""Nodes that report and cannot be called from here: the reason, once, until they answer."""

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec.structs import replace
from structlog.testing import capture_logs

from agentd.errors import NodeUnavailable
from agentd_fleet.nodes import calls
from agentd_fleet.nodes.calls import GATEWAY, NodeNotCalled, Nodes
from agentd_fleet.view.fleet_state import (
    MAX_LOGGED,
    FleetState,
)
from agentd_fleet.view.fleet_view import FleetNode, NodeRuntime, NodeStatus
from end_to_end.fleet.network import Proxy
from support.certificates import certificate, certificate_that_ends

NODE = "node-1"
SILENT_NAME = "silent.example"


class Place:
    """The address of a node, and the servers and proxies there."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.answer: Callable[[web.Request], Awaitable[web.StreamResponse]] = answered
        self.proxy = Proxy("")
        self.tls: ssl.SSLContext | None = None

    async def serve(self, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> str:
        """Start the node's server behind the proxy; return its address."""

        async def handle(request: web.Request) -> web.StreamResponse:
            return await self.answer(request)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        self.stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, host, 0)
        await site.start()
        port = runner.addresses[0][1]
        self.proxy = Proxy(f"http://127.0.0.1:{port}", tls)
        await self.proxy.start()
        self.stack.push_async_callback(self.proxy.stop)
        return self.proxy.endpoint


async def answered(_: web.Request) -> web.Response:
    return web.json_response({"id": NODE}, headers={"Agentd-Node": NODE})


async def nobody_listens(_: Place) -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


async def packets_are_dropped(place: Place) -> str:
    url = await place.serve()
    place.proxy.drop()
    return url


async def connections_are_reset(place: Place) -> str:
    url = await place.serve()
    place.proxy.is_cut = True
    return url


async def it_never_answers(place: Place) -> str:
    async def hang(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    place.answer = hang
    return await place.serve()


def answering(status: int, text: str = "", node: str = NODE) -> Callable[[Place], Awaitable[str]]:
    async def begin(place: Place) -> str:
        async def answer(_: web.Request) -> web.Response:
            return web.Response(status=status, text=text, headers={"Agentd-Node": node})

        place.answer = answer
        return await place.serve()

    return begin


def with_certificate(days: float | None) -> Callable[[Place], Awaitable[str]]:
    """A node whose certificate ends so soon, or is of another authority than the gateway's."""

    async def begin(place: Place) -> str:
        made = certificate(place.folder) if days is None else None
        cert, key = made or certificate_that_ends(place.folder, days or 0)
        server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        server.load_cert_chain(cert, key)
        place.tls = ssl.create_default_context(cafile=None if days is None else str(cert))
        place.tls.check_hostname = False
        return await place.serve(server)

    return begin


def named(host: str) -> Callable[[Place], Awaitable[str]]:
    async def begin(_: Place) -> str:
        return f"https://{host}:6001"

    return begin


SLOW = "no answer in time"
TOKEN = "refuses the gateway's token"  # noqa: S105
NOT_A_GATEWAY = "does not accept the token as a gateway's (gateway = true)"
OTHER = "another server answers at its address"
CASES: dict[str, tuple[Callable[[Place], Awaitable[str]], str, bool]] = {
    "nobody listens": (nobody_listens, "Connection refused", True),
    "packets are dropped": (packets_are_dropped, SLOW, True),
    "connections are reset": (connections_are_reset, "", False),
    "it never answers": (it_never_answers, SLOW, False),
    "its certificate has expired": (with_certificate(-1), "certificate has expired", True),
    "its certificate is of another CA": (with_certificate(None), "self-signed certificate", True),
    "its name is unknown": (named("node-1.invalid"), "its name cannot be resolved: ", True),
    "its name server is silent": (named(SILENT_NAME), SLOW, True),
    "another token": (answering(401), TOKEN, True),
    "a token of no gateway": (answering(403, "… (gateway = true)"), NOT_A_GATEWAY, True),
    "another node": (answering(421), "is not the node at its address", True),
    "another server": (answering(200, node=""), OTHER, False),
    "a redirect": (answering(302), OTHER, False),
}
"""The fault, the beginning of the reason, and whether the node is certain to have done
nothing."""


@pytest.fixture
async def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    """An address, beside a name server that never answers for one name."""
    look_up, never = socket.getaddrinfo, threading.Event()

    def look_up_or_wait(host: str, *more: Any, **options: Any) -> Any:
        if host.endswith(SILENT_NAME):
            never.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "the test is over")
        return look_up(host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up_or_wait)
    async with AsyncExitStack() as stack:
        stack.callback(never.set)
        yield Place(tmp_path, stack)


def listed(url: str, node_id: str = NODE, status: NodeStatus = NodeStatus.READY) -> FleetNode:
    return FleetNode(node_id, {}, {}, status, url)


async def call(nodes: Nodes, node: FleetNode) -> None:
    await nodes.call(node, GATEWAY, "GET", "/v1/kernels", patience_s=5.0)


@pytest.mark.parametrize(("begin", "reason", "is_certain"), CASES.values(), ids=CASES)
async def test_node_that_cannot_be_called_has_the_true_reason_once(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    begin: Callable[[Place], Awaitable[str]],
    reason: str,
    *,
    is_certain: bool,
) -> None:
    node = listed(await begin(place))
    monkeypatch.setattr(calls, "ANSWER_TIMEOUT_S", 1.0)
    state = FleetState()
    state.update_node(node)
    async with Nodes(state, "token", place.tls) as nodes:
        with capture_logs() as lines:
            with pytest.raises(NodeUnavailable) as first:
                await nodes.call(node, GATEWAY, "GET", "/v1/kernels", patience_s=2.0)
            assert isinstance(first.value, NodeNotCalled) is is_certain
            known = state.node(NODE)
            assert known is not None
            assert known.unreachable.startswith(reason)
            assert known.unreachable
            assert not state.has_answered(NODE)
            for _ in range(2):
                with pytest.raises(NodeUnavailable):
                    await call(nodes, node)
        events = [(line["event"], line["address"]) for line in lines]
        assert events == [("node.unreachable", node.url)]


async def test_node_is_as_before_once_it_answers(place: Place) -> None:
    node = listed(await place.serve())
    state = FleetState()
    state.update_node(node)
    async with Nodes(state) as nodes:
        place.proxy.is_cut = True
        with capture_logs() as lines:
            with pytest.raises(NodeUnavailable):
                await call(nodes, node)
            place.proxy.mend()
            await call(nodes, node)
            await call(nodes, node)
        assert [line["event"] for line in lines] == ["node.unreachable", "node.reached"]
        assert state.unreachable == {}
        assert state.has_answered(NODE)


async def test_answer_of_a_former_address_says_nothing(place: Place) -> None:
    former, node = listed(await nobody_listens(place)), listed(await place.serve())
    state = FleetState()
    state.update_node(node)
    async with Nodes(state) as nodes:
        with pytest.raises(NodeUnavailable):
            await call(nodes, former)
        assert state.unreachable == {}


@pytest.mark.parametrize("status", [NodeStatus.DAEMON_DOWN, NodeStatus.LOST])
async def test_call_of_a_node_that_is_down_ends_soon(
    place: Place, monkeypatch: pytest.MonkeyPatch, status: NodeStatus
) -> None:
    node = listed(await it_never_answers(place), status=status)
    state = FleetState()
    state.update_node(node)
    async with asyncio.timeout(5), Nodes(state) as nodes:
        with pytest.raises(NodeUnavailable):
            await nodes.call(node, GATEWAY, "DELETE", "/v1/kernels/k1", patience_s=3600.0)
    assert state.unreachable == {}  # its state says so already


async def test_node_that_failed_a_call_is_asked_whether_it_works_again(place: Place) -> None:
    """A slow call must not fail, and mark the node again, because an earlier one was lost."""
    paths: list[tuple[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        paths.append((request.method, request.path))
        assert request.method == "GET" or NODE not in state.unreachable
        return await answered(request)

    place.answer, state = answer, FleetState()
    node = listed(await place.serve())
    state.update_node(node)
    async with Nodes(state) as nodes:
        state.set_unreachable(NODE, "Connection refused")
        for _ in range(2):
            await nodes.call(node, GATEWAY, "DELETE", "/v1/kernels/k1", patience_s=3600.0)
    delete = ("DELETE", "/v1/kernels/k1")
    assert paths == [("GET", "/v1/node"), delete, delete]


CALLS: dict[str, Callable[[Nodes, FleetNode], Awaitable[object]]] = {
    "delete": lambda nodes, node: nodes.call(node, GATEWAY, "DELETE", "/k1", patience_s=3600.0),
    "exec": lambda nodes, node: nodes.open_websocket(node, GATEWAY, "/k1/exec"),
}


@pytest.mark.parametrize("method", CALLS)
async def test_node_that_is_still_silent_is_not_called(
    place: Place, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(calls, "ANSWER_TIMEOUT_S", 0.2)
    paths: list[str] = []

    async def hang(request: web.Request) -> web.Response:
        paths.append(request.path)
        await asyncio.Event().wait()
        raise AssertionError

    place.answer, state = hang, FleetState()
    node = listed(await place.serve())
    state.update_node(node)
    async with Nodes(state) as nodes:
        state.set_unreachable(NODE, "no answer in time")
        with pytest.raises(NodeNotCalled):
            await CALLS[method](nodes, node)
    assert paths == ["/v1/node"]


CHANGES = {
    "it moves": ([{"url": "http://b"}], False),
    "it returns": ([{"status": NodeStatus.LOST}, {}], False),
    "it reports": ([{"generation": 2}], True),
    "it is lost": ([{"status": NodeStatus.LOST}], True),
}


@pytest.mark.parametrize(("changes", "is_marked"), CHANGES.values(), ids=CHANGES)
async def test_reason_of_a_failed_call_ends_at_a_move_or_a_return(
    changes: list[dict[str, Any]], *, is_marked: bool
) -> None:
    state = FleetState()
    state.update_node(listed("http://a"))
    state.set_unreachable(NODE, "")
    state.set_unreachable(NODE, "Connection refused")
    for change in changes:
        state.update_node(replace(listed("http://a"), **change))
    node = state.node(NODE)
    assert node is not None
    assert (bool(node.unreachable), NODE in state.unreachable) == (is_marked, is_marked)
    assert not state.has_answered(NODE)


async def test_failed_calls_hide_no_other_reason_in_the_log() -> None:
    state, node = FleetState(), listed("http://a")
    state.update_node(node)
    with capture_logs() as lines:
        nodes = Nodes(state)
        for _ in range(3 * MAX_LOGGED):
            nodes._note(node, "no answer in time")
            nodes._note(node, "")
        state.update_node(replace(node, runtime=NodeRuntime("docker", "unavailable")))
        nodes._note(node, "certificate has expired")
    said = [line["reason"] for line in lines if "reason" in line]
    assert said.count("no answer in time") == MAX_LOGGED
    assert said[MAX_LOGGED:] == ["runtime docker is unavailable", "certificate has expired"]


async def test_node_that_loses_only_large_requests_fills_no_log(place: Place) -> None:
    async def lose(request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            assert request.transport is not None
            request.transport.abort()
        return await answered(request)

    place.answer = lose
    state, node = FleetState(), listed(await place.serve())
    state.update_node(node)
    with capture_logs() as lines:
        async with Nodes(state) as nodes:
            for _ in range(3 * MAX_LOGGED):
                with pytest.raises(NodeUnavailable):
                    await nodes.call(node, GATEWAY, "POST", "/v1/agents/a/kernels", body=b"x")
                await nodes.probe(node)
    said = [line["event"] for line in lines]
    assert said == ["node.unreachable", "node.reached"] * MAX_LOGGED


async def test_silent_names_delay_no_other_name(place: Place) -> None:
    state = FleetState()
    url = (await place.serve()).replace("127.0.0.1", "localhost")
    silent = [listed(f"https://{n}.{SILENT_NAME}:1", f"n{n}") for n in range(40)]
    async with Nodes(state) as nodes:
        waiting = [asyncio.create_task(call(nodes, node)) for node in silent]
        await asyncio.sleep(0)
        async with asyncio.timeout(2):
            await call(nodes, listed(url))
        assert [task.exception() for task in waiting if task.done()] == []
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_idle_connection_is_not_trusted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall that begins to drop packets is met by a connection, not by a create."""
    monkeypatch.setattr(calls, "KEEPALIVE_S", 0.0)
    monkeypatch.setattr(calls, "ANSWER_TIMEOUT_S", 0.5)
    node = listed(await place.serve())
    state = FleetState()
    state.update_node(node)
    async with Nodes(state) as nodes:
        await call(nodes, node)
        place.proxy.drop()
        with pytest.raises(NodeNotCalled):
            await nodes.call(node, GATEWAY, "POST", "/v1/agents/a/kernels", patience_s=60.0)


class Names:
    """The name service of `localhost`, whose answer a test chooses; None is silence."""

    def __init__(self) -> None:
        self.answer: str | int | None = "127.0.0.1"
        self.is_over = threading.Event()
        self.look_up = socket.getaddrinfo

    def answered(self, host: str, *more: Any, **options: Any) -> Any:
        if self.answer is None:
            self.is_over.wait()
        if not isinstance(self.answer, str):
            raise socket.gaierror(self.answer, "no answer")
        return self.look_up(self.answer if host == "localhost" else host, *more, **options)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    made = Names()
    monkeypatch.setattr(socket, "getaddrinfo", made.answered)
    monkeypatch.setattr(calls, "KEEPALIVE_S", 0.0)
    monkeypatch.setattr("agentd.client.names.NAME_TIMEOUT_S", 0.1)
    connector = partial(aiohttp.TCPConnector, ttl_dns_cache=0)
    monkeypatch.setattr(aiohttp, "TCPConnector", connector)
    yield made
    made.is_over.set()


FAILURES = {
    "its name server is silent": (None, True),
    "it cannot answer for the moment": (socket.EAI_AGAIN, True),
    "its server fails": (socket.EAI_FAIL, True),
    "the name is gone": (socket.EAI_NONAME, False),
}


@pytest.mark.parametrize(("answer", "is_reached"), FAILURES.values(), ids=FAILURES)
async def test_name_that_was_known_outlasts_its_name_server(
    place: Place, names: Names, answer: int | None, *, is_reached: bool
) -> None:
    node = listed((await place.serve()).replace("127.0.0.1", "localhost"))
    state = FleetState()
    state.update_node(node)
    async with Nodes(state) as nodes:
        await call(nodes, node)
        names.answer = answer
        for _ in range(3):
            with nullcontext() if is_reached else pytest.raises(NodeNotCalled):
                await call(nodes, node)
        assert state.has_answered(NODE) is is_reached
        threads = [t.name for t in threading.enumerate() if t.name == "name localhost"]
        assert len(threads) == (answer is None)


async def test_node_is_found_where_its_name_leads_to_now(place: Place, names: Names) -> None:
    node = listed((await place.serve()).replace("127.0.0.1", "localhost"))
    state = FleetState()
    state.update_node(node)
    async with Nodes(state) as nodes:
        names.answer = "127.0.0.2"  # where nobody listens
        with pytest.raises(NodeNotCalled):
            await call(nodes, node)
        names.answer = "127.0.0.1"
        await call(nodes, node)
        assert state.unreachable == {}
