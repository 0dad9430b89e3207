"""Connections that are kept: what is sent, what is believed, and when one is given up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from agentd.runtimes.docker.engine_errors import EngineAnswerLost, EngineUnreachable
from agentd.runtimes.docker.kept_connections import MOST_IDLE, Bounds, EngineAnswer, KeptConnections

MOST = Bounds(1000, 100)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"
CUT = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"
REFUSAL = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\nno"
END = None
"""The server hangs up."""


class Server:
    """Answers each request on each connection with what comes next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.requests: list[bytes] = []
        self.connections = 0
        self.ended = asyncio.Queue[int]()
        self.says: list[list[bytes | None]] = []
        """Of each request: the pieces of its answer."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.partition(b"Content-Length: ")[2].partition(b"\r")[0])
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.says.pop(0):
                    if piece is END:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            self.ended.put_nowait(number)


@pytest.fixture
async def server(folder: Path) -> AsyncIterator[Server]:
    made = Server(folder / "engine.sock")
    listening = await asyncio.start_unix_server(made.serve, made.path)
    async with listening:
        yield made


@pytest.fixture
async def kept(server: Server) -> AsyncIterator[KeptConnections]:
    made = KeptConnections(server.path)
    yield made
    made.close()


async def ask(
    kept: KeptConnections, method: str = "GET", body: bytes | None = None
) -> EngineAnswer:
    async with asyncio.timeout(20):
        return await kept.exchange(method, "/x?a=b", body, MOST, 60.0)


async def ask_both(
    kept: KeptConnections, *timeouts_s: float
) -> tuple[EngineAnswer, EngineAnswer | None]:
    async with asyncio.timeout(20):
        return await kept.exchange_and_get("POST", "/x", "/y", MOST, timeouts_s or (60.0, 60.0))


async def until_ended(server: Server) -> None:
    async with asyncio.timeout(20):
        await server.ended.get()
    for _ in range(3):  # turns in which the client reads that, and is told
        await asyncio.sleep(0)


async def test_requests_share_one_connection(server: Server, kept: KeptConnections) -> None:
    server.says = [[OK], [CHUNKED], [b"HTTP/1.1 204 No Content\r\n\r\n"]]
    assert await ask(kept) == EngineAnswer(200, b"{}")
    assert await ask(kept, "POST", b'{"a":1}') == EngineAnswer(200, b"{}")
    assert await ask(kept, "DELETE") == EngineAnswer(204, b"")
    assert server.connections == 1
    assert server.requests[1] == (
        b"POST /x?a=b HTTP/1.1\r\nHost: docker\r\nAccept-Encoding: identity\r\n"
        b'Content-Type: application/json\r\nContent-Length: 7\r\n\r\n{"a":1}'
    )


@pytest.mark.parametrize(
    ("pieces", "answer", "connections"),
    [
        ([bytes([byte]) for byte in OK], EngineAnswer(200, b"{}"), 1),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", OK], EngineAnswer(200, b"{}"), 1),
        ([b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}", END],
         EngineAnswer(200, b"{}"), 2),
        ([REFUSAL, END], EngineAnswer(400, b"no"), 2),
        ([b"HTTP/1.1 500 No\r\nContent-Length: 500\r\n\r\n", b"x" * 300],
         EngineAnswer(500, b"x" * 100, is_cut=True), 2),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n", b"x" * 3000],
         EngineAnswer(200, b"x" * 1000, is_cut=True), 2),
        ([OK + OK], EngineAnswer(200, b"{}"), 2),
        ([OK + CUT], EngineAnswer(200, b"{}"), 2),
    ],
)  # fmt: skip
async def test_responses_are_read_strictly(server, kept, pieces, answer, connections) -> None:
    """A connection that said more than it was asked, or less, is not used again."""
    server.says = [pieces, [OK]]
    assert await ask(kept) == answer
    assert await ask(kept) == EngineAnswer(200, b"{}")
    assert server.connections == connections


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        ([CUT, END], "within the response"),
        ([b"HTTP/1.1 200 OK\r\n\r\nuntil the end", END], "within the response"),
        ([END], "before the response"),
        ([b"SSH-2.0-OpenSSH\r\n"], "not HTTP"),
        ([b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: tcp\r\n\r\n"], "not HTTP"),
        ([b"HTTP/1.1 200 OK\r\n" + b"X-Many: 1\r\n" * 10_000], "too large"),
    ],
)
async def test_malformed_response_is_lost(server, kept, pieces, told) -> None:
    server.says = [pieces, [OK]]
    with pytest.raises(EngineAnswerLost, match=told):
        await ask(kept)
    assert await ask(kept) == EngineAnswer(200, b"{}")
    assert server.connections == 2


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_a_kept_connection_that_ends_unanswered_is_replaced(server, kept, method) -> None:
    server.says = [[OK], [END], [OK]]
    await ask(kept)
    assert await ask(kept, method) == EngineAnswer(200, b"{}")
    assert server.connections == 2


async def test_mutating_calls_are_not_repeated(server: Server, kept: KeptConnections) -> None:
    server.says = [[OK], [END]]
    await ask(kept)
    with pytest.raises(EngineAnswerLost):
        await ask(kept, "POST", b"{}")
    assert len(server.requests) == 2


async def test_an_idle_connection_that_ends_is_forgotten(server, kept) -> None:
    """As when an engine restarts: the next request is sent once, over a new connection."""
    server.says = [[OK, END], [OK]]
    await ask(kept)
    await until_ended(server)
    assert await ask(kept, "POST", b"{}") == EngineAnswer(200, b"{}")
    assert server.connections == 2


async def test_an_idle_connection_that_speaks_is_ended(server, kept) -> None:
    server.says = [[OK, CUT], [OK]]
    await ask(kept)
    await until_ended(server)
    assert await ask(kept) == EngineAnswer(200, b"{}")
    assert server.connections == 2


async def test_a_call_and_what_is_shown_after_it_are_sent_together(server, kept) -> None:
    server.says = [[b"HTTP/1.1 204 No Content\r\n\r\n"], [CHUNKED], [OK]]
    answers = await ask_both(kept)
    assert answers == (EngineAnswer(204, b""), EngineAnswer(200, b"{}"))
    assert [request.split()[:2] for request in server.requests] == [
        [b"POST", b"/x"],
        [b"GET", b"/y"],
    ]
    assert await ask(kept) == EngineAnswer(200, b"{}")
    assert server.connections == 1


@pytest.mark.parametrize(
    ("first", "second", "answer"),
    [
        ([b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno"], [],
         EngineAnswer(404, b"no")),
        ([b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno"], [OK],
         EngineAnswer(404, b"no")),
        ([b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"], [OK],
         EngineAnswer(200, b"{}")),
        ([OK, END], [], EngineAnswer(200, b"{}")),
        ([OK], [END], EngineAnswer(200, b"{}")),
        ([OK], [CUT, END], EngineAnswer(200, b"{}")),
        ([OK], [b"SSH-2.0-OpenSSH\r\n"], EngineAnswer(200, b"{}")),
    ],
)  # fmt: skip
async def test_a_first_answer_counts_without_the_second(
    server, kept, first, second, answer
) -> None:
    server.says = [first, second]
    assert await ask_both(kept) == (answer, None)
    server.says = [[OK]]
    assert await ask(kept) == EngineAnswer(200, b"{}")
    assert server.connections == 2


async def test_each_answer_has_a_time_of_its_own(server, kept) -> None:
    server.says = [[OK], []]
    assert await ask_both(kept, 60.0, 0.01) == (EngineAnswer(200, b"{}"), None)
    server.says = [[], []]
    with pytest.raises(EngineAnswerLost, match=r"no response from the engine within 0\.01 s"):
        await ask_both(kept, 0.01, 60.0)


async def test_a_lost_first_answer_is_not_asked_for_again(server, kept) -> None:
    server.says = [[OK], [END], [OK]]
    await ask(kept)
    with pytest.raises(EngineAnswerLost):
        await ask_both(kept)
    assert len(server.requests) == 2


async def test_cancelled_call_closes_its_connection(server: Server, kept: KeptConnections) -> None:
    server.says = [[], [OK]]
    asking = asyncio.create_task(ask(kept))
    async with asyncio.timeout(20):
        while not server.requests:
            await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until_ended(server)
    assert await ask(kept) == EngineAnswer(200, b"{}")


async def test_as_many_connections_as_calls_and_few_are_kept(server, kept) -> None:
    count = MOST_IDLE + 4
    server.says = [[OK]] * count + [[OK]] * MOST_IDLE
    await asyncio.gather(*(ask(kept) for _ in range(count)))
    assert server.connections == count
    for _ in range(4):
        await until_ended(server)
    await asyncio.gather(*(ask(kept) for _ in range(MOST_IDLE)))
    assert server.connections == count


async def test_closed_client_makes_no_calls(server: Server, kept: KeptConnections) -> None:
    server.says = [[]]
    asking = asyncio.create_task(ask(kept, "POST", b"{}"))
    async with asyncio.timeout(20):
        while not server.requests:
            await asyncio.sleep(0)
    kept.close()
    with pytest.raises(EngineAnswerLost, match="agentd closed the connection"):
        await asking
    with pytest.raises(EngineUnreachable, match="agentd closed the connection"):
        await ask(kept, "POST", b"{}")
    assert len(server.requests) == 1


async def test_refused_connection_counts_as_never_asked(folder: Path) -> None:
    with pytest.raises(EngineUnreachable, match=r"none\.sock: No such file"):
        await ask(KeptConnections(folder / "none.sock"), "POST")
