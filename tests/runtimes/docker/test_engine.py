"""The client of the Engine's API: three ways to fail, and nothing left open."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from agentd.runtimes.docker.engine import EngineClient
from agentd.runtimes.docker.engine_errors import EngineAnswerLost, EngineError, EngineUnreachable
from runtimes.docker.fake_engine import FakeEngine, says


@pytest.fixture
def engine(fake_engine: FakeEngine) -> FakeEngine:
    return fake_engine


async def test_version_is_requested_once_per_connection(engine, client) -> None:
    engine.answer = says(200, b"[]")
    for _ in range(2):
        assert await client.call("GET", "/containers/json") == []
    engine.version = "1.45"
    client.forget_version()
    await client.call("GET", "/info")
    assert engine.asked == [
        "GET /version", "GET /v1.41/containers/json", "GET /v1.41/containers/json",
        "GET /version", "GET /v1.45/info",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"message": "No such container"}', "No such container"),
        (b"plain words", "plain words"),
        (b'{"other": 1}', '{"other": 1}'),
        (b"", "no reason given"),
        (b"\xff", "\N{REPLACEMENT CHARACTER}"),
    ],
)
async def test_a_refusal_carries_status_and_message(engine, client, body, message) -> None:
    engine.answer = says(404, body)
    with pytest.raises(EngineError, match=r".*") as caught:
        await client.call("GET", "/x")
    assert (caught.value.status, caught.value.message) == (404, message)


async def test_only_a_lost_second_answer_is_asked_for_again(engine, client) -> None:
    """As from an engine that ends each connection after one answer."""

    async def one_answer(request: web.Request) -> web.Response:
        response = web.json_response({"path": request.path})
        response.force_close()
        return response

    engine.answer = one_answer
    shown = await client.call_and_show("POST", "/containers/a/start", "/containers/a/json", 60.0)
    assert shown == {"path": "/v1.41/containers/a/json"}
    assert engine.asked[1:] == ["POST /v1.41/containers/a/start", "GET /v1.41/containers/a/json"]


async def test_no_call_takes_what_follows_a_refused_one_for_its_answer(engine, client) -> None:
    removing = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.method == "GET":
            await removing.wait()
            return web.json_response({"Id": "a"})
        return web.json_response({"message": f"no {request.method}"}, status=409)

    engine.answer = answer
    with pytest.raises(EngineError, match="no POST"):
        await client.call_and_show("POST", "/containers/a/start", "/containers/a/json", 60.0)
    call = asyncio.create_task(client.call("DELETE", "/containers/a"))
    await asyncio.sleep(0)
    removing.set()
    with pytest.raises(EngineError, match="no DELETE"):
        await call


async def test_both_paths_of_a_call_are_checked(client) -> None:
    with pytest.raises(ValueError, match="invalid Engine API path"):
        await client.call_and_show("POST", "/containers/a/start", "/containers/a?b", 60.0)


async def test_an_answer_that_is_no_json_is_lost(engine, client) -> None:
    engine.answer = says(200, b"<html>")
    with pytest.raises(EngineAnswerLost, match="JSON"):
        await client.call("POST", "/containers/create")
    engine.answer = says(204, b"")
    assert await client.call("POST", "/x") is None


async def test_a_connection_that_breaks_is_a_lost_answer(engine, client) -> None:
    async def broken(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    engine.answer = broken
    with pytest.raises(EngineAnswerLost):
        await client.call("POST", "/containers/create", body={"a": 1})


async def test_refused_connection_counts_as_never_asked(folder: Path) -> None:
    client = EngineClient(folder / "none.sock")
    with pytest.raises(EngineUnreachable, match=r"none\.sock: No such file"):
        await client.call("POST", "/containers/create")
    await client.close()


async def test_leaving_a_stream_hangs_up(engine: FakeEngine, client: EngineClient) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"line\n")
                await asyncio.sleep(0.01)
        finally:
            engine.hung_up.set()

    engine.answer = endless
    async with client.stream("GET", "/events", {}) as stream:
        assert await stream.readline() == b"line\n"
    async with asyncio.timeout(10):
        await engine.hung_up.wait()


async def test_a_stream_that_is_refused_says_why(engine: FakeEngine, client: EngineClient) -> None:
    engine.answer = says(500, b'{"message": "it went wrong"}')
    with pytest.raises(EngineError, match="it went wrong"):
        async with client.stream("GET", "/events", {}):
            pass


async def test_a_call_that_is_never_answered_is_a_lost_answer(
    engine: FakeEngine, client: EngineClient
) -> None:
    gate, received = asyncio.Event(), asyncio.Event()

    async def never(_: web.Request) -> web.StreamResponse:
        received.set()
        await gate.wait()
        return web.Response()

    engine.answer = never
    with pytest.raises(EngineAnswerLost, match="within 0 s"):
        await client.call("POST", "/containers/x/start", timeout_s=0)
    async with asyncio.timeout(20):
        await received.wait()
        received.clear()
        calling = asyncio.create_task(client.call("POST", "/containers/x/start"))
        await received.wait()
    await client.close()
    with pytest.raises(EngineAnswerLost):
        await calling
    with pytest.raises(EngineUnreachable, match="agentd closed the connection"):
        await client.call("DELETE", "/containers/x")
    gate.set()
