"""The client library on a real node: every call, typed answers, errors, streams that go on."""

import asyncio
import inspect
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import mypy.api
import pytest
from aiohttp import web

from agentd.client import AsyncClient, Client, NodeEvent
from agentd.client.calls import Call
from agentd.client.errors import cut_stream_error, error_from_problem, error_from_response
from agentd.client.paths import api_path, next_query
from agentd.errors import (
    AgentdError,
    AnswerLost,
    Forbidden,
    InsufficientResource,
    InvalidRequest,
    NotReady,
    Refused,
    RefusedForNow,
    Unavailable,
    UnknownKernel,
    Unreachable,
    UnsupportedResource,
)
from agentd.http.problem_responses import STATUSES
from agentd.rpc.routes import ROUTES
from support.daemon import AGENTS, Daemon, gpus
from support.fork_server import run
from support.web_server import served


@pytest.fixture
async def plain(folder) -> AsyncIterator[Daemon]:
    made = Daemon(folder, "process")
    await made.start(AGENTS + gpus())
    yield made
    await made.close()


SLEEP = {"command": ["sleep", "1000"], "slots": {"cpu": 0, "cuda.device": 1}}


async def test_the_life_of_a_kernel_with_types(plain: Daemon) -> None:
    async with AsyncClient(plain.folder / "agentd.sock") as node:
        assert (await node.whoami())["role"] == "admin"
        made = await node.create_kernel("agent-1", {**SLEEP, "labels": {"job": "7"}})
        assert made["state"] == "running"
        assert [k["kernel_id"] for k in await node.kernels(labels={"job": "7"})] == [
            made["kernel_id"]
        ]
        assert await node.kernels(state=["failed", "lost"]) == []
        assert await node.kernels("agent-2") == []
        assert (await node.kernel(made["kernel_id"])) == made
        decision = await node.explain("agent-1", SLEEP)
        assert list(decision["allocation"]["cuda"]["cuda.device"]) == ["cuda1"]
        stopped = await node.stop_kernel(made["kernel_id"], 0)
        assert stopped["state"] == "terminated"
        await node.delete_kernel(made["kernel_id"])
        with pytest.raises(UnknownKernel):
            await node.kernel(made["kernel_id"])


async def test_logs_come_byte_for_byte_and_follow(plain: Daemon) -> None:
    async with AsyncClient(plain.folder / "agentd.sock") as node:
        script = "printf 'a\\nb\\n\\377'; sleep 0.2; echo end"
        command = {"command": ["sh", "-c", script], "kernel_id": "k1", "slots": {"cpu": 0}}
        await node.create_kernel("agent-1", command)
        followed = b"".join([chunk async for chunk in node.logs("k1", follow=True)])
        assert followed == b"a\nb\n\xffend\n"
        assert b"".join([chunk async for chunk in node.logs("k1", tail=1)]) == b"\xffend\n"


async def test_refusals_are_raised_as_what_they_are(plain: Daemon) -> None:
    async with AsyncClient(plain.folder / "agentd.sock") as node:
        with pytest.raises(InsufficientResource) as refused:
            await node.create_kernel("agent-1", {**SLEEP, "slots": {"cuda.device": 3}})
        assert (refused.value.slot, refused.value.free) == ("cuda.device", "2")
        assert [row["device"] for row in refused.value.explain] == ["cuda0", "cuda1"]
        with pytest.raises(UnsupportedResource) as unsupported:
            await node.create_kernel("agent-1", {**SLEEP, "slots": {"tpu.chip": 1}})
        assert unsupported.value.slots == ["tpu.chip"]
        assert "cuda.device" in unsupported.value.known
        with pytest.raises(InvalidRequest) as invalid:
            await node.create_kernel("agent-1", {"comand": ["true"]})
        assert invalid.value.problems[0].where == "comand"


async def test_client_waits_for_a_starting_daemon_only(plain: Daemon) -> None:
    async with AsyncClient(plain.folder / "agentd.sock", timeout_s=20) as node:
        await plain.stop()
        with pytest.raises(Unreachable):
            await node.node()
        starting = asyncio.create_task(plain.start())
        async with asyncio.timeout(20):
            while True:
                try:
                    assert (await node.node())["id"] == plain.node
                    break
                except Unreachable:
                    await asyncio.sleep(0.02)
        await starting


async def first_event(node: AsyncClient, events: AsyncIterator[NodeEvent]) -> NodeEvent:
    """Repeat an action until the open stream yields its event."""
    first = asyncio.ensure_future(anext(events))
    async with asyncio.timeout(20):
        while not first.done():
            await node.drain("cuda", "cuda0")
            await node.undrain("cuda", "cuda0")
            await asyncio.wait([first], timeout=0.05)
    return await first


async def test_events_go_on_over_a_restart(plain: Daemon) -> None:
    async with (
        AsyncClient(plain.folder / "agentd.sock") as node,
        aclosing(node.events()) as events,
    ):
        event = await first_event(node, events)
        assert (event.kind, event.data["id"]) == ("device", "cuda0")
        await plain.restart(number=signal.SIGKILL)
        async with asyncio.timeout(20):
            kinds = [(await anext(events)).kind]
        assert kinds == ["reset"]
        await node.drain("cuda", "cuda1")
        async with asyncio.timeout(20):
            async for event in events:
                if event.kind == "device" and event.data["id"] == "cuda1":
                    break
        assert event.data["state"] == "drained"


async def test_events_may_be_as_long_as_a_kernel_says(plain: Daemon) -> None:
    async with (
        AsyncClient(plain.folder / "agentd.sock") as node,
        aclosing(node.events()) as events,
    ):
        await first_event(node, events)
        long = {
            "command": ["sleep", "1000", "\u20ac" * 32000],
            "labels": dict.fromkeys("xy", "\u20ac" * 1300),
        }
        await node.create_kernel("agent-1", {**SLEEP, **long, "kernel_id": "long"})
        async with asyncio.timeout(10):
            async for event in events:
                if event.kind == "kernel":
                    break
        assert event.data["labels"] == long["labels"]


@pytest.mark.parametrize(
    ("link", "path"),
    [
        (None, None),
        ('</v1/kernels?after=7~k1>; rel="next"', "/v1/kernels?after=7~k1"),
        ('<http://evil.example/v1/reload?after=1>; rel="next"', "/v1/kernels?after=1"),
        ('<?after=1>;rel=next, </v1/kernels>; rel="first"', "/v1/kernels?after=1"),
        ('</v1/kernels?a=1>; rel="prev"', None),
        ('</v1/kernels>; rel="next"', None),
        ('</v1/kernels?after=\udcff>; rel="next"', None),
        ("<" * 4096, None),
    ],
)
def test_next_page_has_the_path_of_the_call(link: str | None, path: str | None) -> None:
    following = Call("GET", "/v1/kernels?state=running", is_paged=True).next_page(link)
    assert (following.path if following else None) == path
    assert Call("GET", "/v1/kernels?limit=5").next_page(link) is None


def test_link_of_any_length_is_read_in_linear_time() -> None:
    """Nodes choose it, and a gateway reads it in its event loop."""
    assert next_query("<?" + "a" * 10**6) is None  # in quadratic time an hour


async def test_page_that_follows_itself_ends_every_client() -> None:
    """A cache in front of the daemon that does not look at the query has one page for all."""

    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        link = b'Link: </v1/kernels?after=7~k1>; rel="next"\r\n'
        writer.write(b"HTTP/1.1 200 OK\r\n" + link + b"Content-Length: 2\r\n\r\n[]")
        writer.close()

    async with await asyncio.start_server(page, "127.0.0.1", 0) as server, asyncio.timeout(20):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with AsyncClient(url=url) as node:
            with pytest.raises(Refused, match="the same page again"):
                await node.kernels()
        with pytest.raises(Refused, match="the same page again"):
            await asyncio.to_thread(Client(url=url).kernels)
        done = await asyncio.to_thread(run, "agentctl", "--fleet", url, "ls")
        assert (done.returncode, "the same page again" in done.stderr) == (1, True), done


async def test_client_raises_own_errors_for_silent_or_odd_servers() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nConnection: close\r\n\r\n<html/>")
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        async with AsyncClient(url=url, timeout_s=0.3) as node:
            with pytest.raises(Unreachable):
                await node.node()
            with pytest.raises(Unreachable):
                await anext(node.logs("k1", follow=True))
    async with await asyncio.start_server(other, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with AsyncClient(url=url) as node:
            with pytest.raises(Refused, match="not JSON"):
                await node.node()
        with pytest.raises(Refused, match="not JSON"):
            await asyncio.to_thread(Client(url=url).node)


async def test_the_client_without_asyncio_has_the_same_calls(plain: Daemon) -> None:
    def life() -> None:
        node = Client(plain.folder / "agentd.sock")
        made = node.create_kernel("agent-1", {**SLEEP, "kernel_id": "k1"})
        assert node.kernels(state="running") == [made]
        assert node.agent("agent-1")["agent_id"] == "agent-1"
        assert b"".join(node.logs("k1")) == b""
        node.delete_kernel("k1", 0)
        with pytest.raises(UnknownKernel):
            node.kernel("k1")
        assert "agentd_info" in node.metrics()

    await asyncio.to_thread(life)
    shared = {name for name, _ in inspect.getmembers(Client, inspect.isfunction)}
    others = {name for name, _ in inspect.getmembers(AsyncClient, inspect.isfunction)}
    assert {n for n in shared if n[0] != "_"} - {"open", "fetch", "asynchronous"} <= others


async def test_a_loop_of_503_ends_at_the_deadline(plain: Daemon) -> None:
    pace = "[plugins]\nopen-timeout = 0.5\n"
    await plain.restart(AGENTS + pace + gpus() + 'fault = "hang"\nfault-at = "open"\n')
    async with AsyncClient(plain.folder / "agentd.sock", timeout_s=1.5) as node:
        with pytest.raises(AgentdError) as refused:
            await node.create_kernel("agent-1", SLEEP)
    assert refused.value.code == "PluginUnavailable"


async def test_exec_waits_a_limited_time_for_readiness(folder: Path) -> None:
    asked = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append("Upgrade" in request.headers)
        if len(asked) < 3:
            problem = {"code": "NotReady", "detail": "not yet", "status": 503}
            return web.json_response(problem, status=503, headers={"Retry-After": "0"})
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        await socket.send_json({"exit_code": 7})
        await socket.close()
        return socket

    async with (
        served(folder / "slow.sock", answer),
        AsyncClient(folder / "slow.sock") as node,
        node.exec("k1", ["true"]) as running,
    ):
        assert [item async for item in running] == []
    assert (running.exit_code, asked) == (7, [True, True, True])
    kept = []  # asyncio closes a connection whose streams nothing refers to
    deaf = await asyncio.start_unix_server(lambda *ends: kept.append(ends), folder / "deaf.sock")
    async with AsyncClient(folder / "deaf.sock", timeout_s=0.2) as node:
        with pytest.raises(Unreachable, match="no answer within"):
            async with node.exec("k1", ["true"]):
                pass
    deaf.close()


async def test_no_client_follows_a_redirect(folder: Path) -> None:
    asked = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return web.Response(status=302, headers={"Location": "/elsewhere"})

    async with served(folder / "moved.sock", answer):
        async with AsyncClient(folder / "moved.sock") as node:
            with pytest.raises(AgentdError, match="HTTP 302"):
                await node.node()
        with pytest.raises(AgentdError, match="HTTP 302"):
            await asyncio.to_thread(Client(folder / "moved.sock").node)
    assert asked == ["/v1/node", "/v1/node"]


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_step_in_a_path_is_no_name_of_anything(name: str) -> None:
    with pytest.raises(InvalidRequest, match="invalid name"):
        api_path("kernels", name, "stop")
    assert api_path("kernels", "a/..") == "/v1/kernels/a%2F.."


class Recorder(Client):
    """A client that keeps the calls that it is asked to make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Call[Any]] = []

    def open(self, call: Call[Any], timeout_s: float | None = None) -> Any:
        self.made.append(call)
        raise Unreachable("never sent")


OPTIONAL = {"kernels": "agent_id", "stats": "kernel_id"}
"""Arguments that lead to another route."""


def test_every_route_has_a_call() -> None:
    node = Recorder()
    names = {name for name in dir(Client) if name[0] != "_"}
    for name in names - {"asynchronous", "execute", "execute_create", "fetch", "open"}:
        method = getattr(node, name)
        required = {
            parameter.name: {} if parameter.name == "request" else "x"
            for parameter in inspect.signature(method).parameters.values()
            if parameter.default is parameter.empty
        }
        further = {OPTIONAL[name]: "x"} if name in OPTIONAL else {}
        for arguments in (required, required | further):
            with suppress(Unreachable):
                list(method(**arguments))
    made = {(call.method, call.path.partition("?")[0]) for call in node.made}
    routes = {(route.method, re.sub("{[a-z_]+}", "x", route.path)) for route in ROUTES}
    assert made == routes - {("GET", "/v1/kernels/x/exec")}  # of the asyncio client alone


REVEALED = """
from agentd.client import AsyncClient, Client
async def main(aio: AsyncClient, plain: Client) -> None:
    reveal_type(await aio.kernel("k1"))
    reveal_type(plain.kernel("k1"))
    reveal_type(aio.logs("k1"))
    reveal_type(plain.logs("k1"))
"""


def test_both_clients_are_typed(tmp_path: Path) -> None:
    (tmp_path / "revealed.py").write_text(REVEALED)
    output, errors, status = mypy.api.run([str(tmp_path / "revealed.py")])
    types = re.findall(r'Revealed type is "([^"]+)"', output)
    assert (status, errors) == (0, ""), output
    assert types[0] == types[1]
    assert "agentd.views.KernelView" in types[0]
    assert types[2:] == ["typing.AsyncIterator[bytes]", "typing.Iterator[bytes]"]


@pytest.mark.parametrize("code", sorted(STATUSES))
def test_every_code_of_the_daemon_is_an_error_of_the_client(code: str) -> None:
    error = error_from_problem({"code": code, "detail": "why", "status": STATUSES[code]})
    assert (error.code, str(error)) == (code, "why")
    assert error.content["code"] == code
    facts = error.facts()
    if isinstance(error, Unavailable):
        cut = cut_stream_error("the log of k1", error)
        assert (cut.code, cut.facts()) == (code, facts)
        assert str(cut) == "the log of k1 was cut off before its end: why"


def test_answers_that_are_no_problems_are_errors_all_the_same() -> None:
    assert isinstance(error_from_response(500, b"<html>"), Refused)
    for status in (502, 504):
        for body in (b"<html>", b'{"message": "An invalid response was received"}', b"[]"):
            assert isinstance(error_from_response(status, body), AnswerLost)
    for body in (b"<html>", b'{"message": "no healthy upstream"}'):
        refused = error_from_response(503, body, "7")
        assert isinstance(refused, RefusedForNow)
        assert (refused.content["status"], refused.retry_after_s) == (503, 7)
    assert isinstance(error_from_problem({"code": "FromTheFuture", "detail": "x"}), Refused)
    assert isinstance(error_from_problem({"code": "NotReady", "detail": "x"}), NotReady)
    lost = error_from_problem({"code": "OutcomeUnknown", "detail": "x", "kernel_id": "k1"})
    assert lost.facts() == {"kernel_id": "k1"}
    forbidden = error_from_problem({"code": "Forbidden", "detail": "x", "roles": ["admin"]})
    assert isinstance(forbidden, Forbidden)
    assert forbidden.roles == ["admin"]


async def test_the_page_for_schedulers_does_what_it_says(plain: Daemon) -> None:
    page = Path(__file__).parents[2] / "docs/how-to/drive-from-a-scheduler.md"
    script = page.read_text().split("```python\n")[1].split("```")[0]
    socket = str(plain.folder / "agentd.sock")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, socket, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), 40)
    assert process.returncode == 0
    assert output.decode().splitlines() == [
        "free: 2 GPUs",
        "elsewhere belongs elsewhere: this node does not know tpu.chip",
        "too-large waits: 2 of cuda.device free",
        "job-7 runs on {'cuda0': '1'}",
        "job-7 runs on {'cuda0': '1'}",
        "mine: job-7",
        "job-7 ended with 3",
        "job-7 is gone",
    ]
