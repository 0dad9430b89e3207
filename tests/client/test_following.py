"""Both clients resume a log and events that broke, and name what they could not get back."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from agentd.client import AsyncClient, Client, following
from agentd.errors import (
    AgentdError,
    AnswerLost,
    NotReady,
    OutputDropped,
    RuntimeUnavailable,
    UnknownKernel,
)
from support.web_server import served

LOG = bytes(range(256)) * 1000


class Sent(NamedTuple):
    """An answer: bytes of the log from `begin` (else as asked) to `end`; the last one is whole."""

    end: int = len(LOG)
    begin: int | None = None
    has_position: bool = True
    log: bytes = LOG
    kernel: str = "1~k1"


class Problem(NamedTuple):
    """An answer that is an error."""

    code: str
    status: int


class Node:
    """A server of one log that answers as a test says, and closes each answer but the whole one."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers
        self.queries: list[dict[str, str]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        if not self.answers:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        answer = self.answers.pop(0)
        if isinstance(answer, Problem):
            content = {"code": answer.code, "detail": "docker is away", "status": answer.status}
            return web.json_response(content, status=answer.status)
        asked = int(request.query.get("from", 0))
        begin = min(asked, len(answer.log)) if answer.begin is None else answer.begin
        headers = {"Log-Position": str(begin)} if answer.has_position else {}
        response = web.StreamResponse(headers={**headers, "Log-Kernel": answer.kernel})
        await response.prepare(request)
        await response.write(answer.log[begin : answer.end])
        if answer.end < len(answer.log):
            raise ConnectionResetError
        return response


class Reading:
    """One reading of a log by a client, with everything that it was told."""

    def __init__(self) -> None:
        self.content = b""
        self.outages: list[AgentdError] = []
        self.dropped: list[tuple[int, int]] = []
        self.error: AgentdError | None = None

    async def read(self, kind: str, path: Path, **options: Any) -> None:
        told = {"on_outage": self.outages.append, **options}
        if told.pop("is_told", True):
            told["on_dropped"] = lambda begin, end: self.dropped.append((begin, end))
        try:
            if kind == "asyncio":
                async with AsyncClient(path, timeout_s=20) as node:
                    async for chunk in node.logs("k1", **told):
                        self.content += chunk
            else:
                await asyncio.to_thread(self.read_blocking, path, told)
        except AgentdError as error:
            self.error = error

    def read_blocking(self, path: Path, options: dict[str, Any]) -> None:
        for chunk in Client(path, timeout_s=20).logs("k1", **options):
            self.content += chunk


@pytest.fixture(params=["asyncio", "blocking"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(following, "RETRY_S", 0.0)
    return request.param


async def read(kind: str, path: Path, answers: list[Any], **options: Any) -> tuple[Reading, Node]:
    node, reading = Node(answers), Reading()
    async with served(path, node.answer):
        await reading.read(kind, path, **options)
    assert not node.answers
    return reading, node


RESUMED: dict[str, tuple[list[Any], dict[str, Any], bytes, list[tuple[int, int]], int]] = {
    "complete at once": ([Sent()], {}, LOG, [], 0),
    "broken twice": ([Sent(1000), Sent(70_000), Sent()], {"follow": True}, LOG, [], 2),
    "broken before its first byte": ([Sent(0), Sent()], {"follow": True}, LOG, [], 1),
    "broken, and not followed": ([Sent(1000), Sent()], {}, LOG, [], 1),
    "a tail": (
        [Sent(70_000, begin=60_000), Sent()], {"tail": 3, "follow": True}, LOG[60_000:], [], 1,
    ),
    "later times": ([Sent(9, begin=7), Sent()], {"since": "2026-11-21T12:00:00Z"}, LOG[7:], [], 1),
    "from a position": ([Sent(1000), Sent()], {"from_position": 500}, LOG[500:], [], 1),
    "from a position beyond the end": ([Sent()], {"from_position": 10**9}, b"", [], 0),
    "the daemon is away for a while": (
        [Sent(1000), *[Problem("NotReady", 503)] * 4, Sent()], {"follow": True}, LOG, [], 1,
    ),
    "two outages": (
        [Sent(9), Problem("NotReady", 503), Sent(99), Problem("NotReady", 503), Sent()],
        {"follow": True}, LOG, [], 2,
    ),
    "an error of a newer version": (
        [Sent(1000), Problem("Tomorrow", 503), Sent()], {"follow": True}, LOG, [], 1,
    ),
    "bytes dropped meanwhile": (
        [Sent(1000), Sent(begin=2000)], {"follow": True}, LOG[:1000] + LOG[2000:],
        [(1000, 2000)], 1,
    ),
    "a head dropped before": ([Sent(begin=2000)], {}, LOG[2000:], [(0, 2000)], 0),
    "a head dropped before the position": (
        [Sent(begin=2000)], {"from_position": 10}, LOG[2000:], [(10, 2000)], 0,
    ),
    "a head dropped that nobody asked for": (
        [Sent(begin=2000)], {"tail": 10}, LOG[2000:], [], 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RESUMED)
async def test_log_is_resumed_by_its_position(tmp_path: Path, kind: str, case: str) -> None:
    answers, options, content, dropped, outages = RESUMED[case]
    reading, node = await read(kind, tmp_path / "socket", [*answers], **options)
    assert (reading.error, reading.content == content) == (None, True)
    assert (reading.dropped, len(reading.outages)) == (dropped, outages)
    for outage in reading.outages:
        assert str(outage).startswith("the log of k1 was cut off before its end: ")
        assert type(outage) in (RuntimeUnavailable, AnswerLost), "it is told at once"
    for query in node.queries[1:]:
        assert "from" in query
        assert not {"tail", "since"} & query.keys()
        assert query.get("follow") == node.queries[0].get("follow")


SHORTER = "the log of k1 has 50 bytes after 1000 were read: its node lost the end"
REPLACED = "the kernel k1 whose log was read is gone; another one has its id"
ENDED: dict[str, tuple[list[Any], dict[str, Any], bytes, type[AgentdError], str]] = {
    "refused at first": ([Problem("NotReady", 503)], {}, b"", NotReady, "docker is away"),
    "refused at last": (
        [Sent(9), Problem("UnknownKernel", 404)], {"follow": True}, LOG[:9], UnknownKernel,
        "docker is away",
    ),
    "no position to resume at": (
        [Sent(9, has_position=False)], {"follow": True}, LOG[:9], RuntimeUnavailable,
        "the log of k1 was cut off before its end: agentd, its runtime or a proxy closed it",
    ),
    "no position any more": (
        [Sent(9), Sent(has_position=False)], {"follow": True}, LOG[:9], RuntimeUnavailable,
        "the log of k1 was cut off before its end: the answer has no Log-Position",
    ),
    "bytes dropped, and nobody to tell": (
        [Sent(1000), Sent(begin=2000)], {"is_told": False}, LOG[:1000], OutputDropped,
        "1000 bytes of the log of k1 were dropped: those from 1000 to 2000",
    ),
    "dropped at first, and nobody to tell": (
        [Sent(begin=2000)], {"is_told": False, "from_position": 5}, b"", OutputDropped,
        "1995 bytes of the log of k1 were dropped: those from 5 to 2000",
    ),
    "a log that became shorter": (
        [Sent(1000), Sent(begin=50, log=LOG[:50])], {"follow": True}, LOG[:1000], UnknownKernel,
        SHORTER,
    ),
    "another kernel of that id": (
        [Sent(1000), Sent(kernel="2~k1")], {"follow": True}, LOG[:1000], UnknownKernel, REPLACED,
    ),
    "another kernel, with a shorter log": (
        [Sent(1000), Sent(begin=50, log=LOG[:50], kernel="2~k1")], {}, LOG[:1000], UnknownKernel,
        REPLACED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDED)
async def test_log_that_cannot_be_resumed_is_an_error(tmp_path: Path, kind: str, case: str) -> None:
    answers, options, content, error, text = ENDED[case]
    reading, _ = await read(kind, tmp_path / "socket", [*answers], **options)
    assert (reading.content, type(reading.error), str(reading.error)) == (content, error, text)


async def test_dropped_head_of_a_whole_log_is_told_only(tmp_path: Path, kind: str) -> None:
    reading, _ = await read(kind, tmp_path / "socket", [Sent(begin=2000)], is_told=False)
    assert (reading.error, reading.content) == (None, LOG[2000:])


async def test_lost_bytes_are_members_of_the_error(tmp_path: Path, kind: str) -> None:
    answers = [Sent(begin=7)]
    reading, _ = await read(kind, tmp_path / "socket", answers, is_told=False, from_position=3)
    assert isinstance(reading.error, OutputDropped)
    error = reading.error
    assert (error.kernel_id, error.begin, error.end) == ("k1", 3, 7)
    assert error.facts() == {"kernel_id": "k1", "begin": 3, "end": 7}


async def test_unfollowed_log_is_given_up_without_progress(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each resumption that yields bytes has the whole timeout again."""
    seconds = itertools.count()
    clock = type("Clock", (), {"monotonic": staticmethod(lambda: float(next(seconds)))})
    monkeypatch.setattr(following, "time", clock)
    parts = [Sent(9 * count) for count in range(1, 40)]
    node, reading = Node([*parts, *[Problem("RuntimeUnavailable", 503)] * 100]), Reading()
    async with served(tmp_path / "socket", node.answer):
        await reading.read(kind, tmp_path / "socket")
    assert reading.content == LOG[: 9 * 39]
    assert isinstance(reading.error, RuntimeUnavailable)
    assert 78 <= len(node.answers) <= 82, "the timeout is 20 s, and each attempt takes one"


@pytest.mark.parametrize("follow", [True, False])
def test_reader_that_pauses_for_long_is_no_outage(
    monkeypatch: pytest.MonkeyPatch, follow: bool
) -> None:
    """A pager takes nothing for an hour, so that the node closes the stream."""
    now = [0.0]
    clock = type("Clock", (), {"monotonic": staticmethod(lambda: now[0])})
    monkeypatch.setattr(following, "time", clock)
    log = following.LogFollower(
        "k1", {"follow": follow}, {"tail": None, "since": None, "from": None},
        timeout_s=30, on_outage=None, on_dropped=None,
    )  # fmt: skip
    log.on_answer({"Log-Position": "0"}.get)
    log.on_chunk(b"x" * 100)
    now[0] += 3600
    assert log.pause_s(RuntimeUnavailable("closed")) == following.RETRY_S
    assert log.next_call().path.partition("?")[2].endswith("from=100")


async def test_daemon_that_is_away_is_told_once(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "RETRY_S", 0.05)
    path, node, reading = tmp_path / "socket", Node([Sent(9)]), Reading()
    async with served(path, node.answer):
        following_log = asyncio.create_task(reading.read(kind, path, follow=True))
        async with asyncio.timeout(20):
            while not reading.outages:
                await asyncio.sleep(0.01)
    path.unlink(missing_ok=True)
    node.answers = [Sent()]
    async with served(path, node.answer):
        await asyncio.wait_for(following_log, 20)
    assert (reading.content, reading.error) == (LOG, None)
    assert len(reading.outages) == 1


EVENT = "event: kernel\ndata: {{}}\nid: {}\n\n"


async def followed_events(
    kind: str, path: Path, count: int, on_outage: Callable[[AgentdError], object], **options: Any
) -> list[tuple[str, str]]:
    """Return the first events, or all before an error, whose code is the last one."""
    seen: list[tuple[str, str]] = []

    def blocking() -> None:
        events = Client(path, timeout_s=20).events(on_outage=on_outage, **options)
        with contextlib.closing(events):  # type: ignore[type-var]
            for event in events:
                seen.append((event.kind, event.id))
                if len(seen) == count:
                    return

    async def asynchronous() -> None:
        async with AsyncClient(path, timeout_s=20) as node:
            async for event in node.events(on_outage=on_outage, **options):
                seen.append((event.kind, event.id))
                if len(seen) == count:
                    return

    try:
        await (asynchronous() if kind == "asyncio" else asyncio.to_thread(blocking))
    except AgentdError as error:
        seen.append((error.code, ""))
    return seen


EVENTS: dict[str, tuple[list[Any], dict[str, str], list[str], list[str | None], int]] = {
    "the daemon ends the stream": (["1", "2", "3"], {}, ["1", "2", "3"], [None, "1", "2"], 2),
    "the daemon is away": (
        ["1", "NotReady", "NotReady", "2"], {}, ["1", "2"], [None, "1", "1", "1"], 1,
    ),
    "no event before the break": (["", "5"], {}, ["reset", "5"], [None, None], 1),
    "an event without its end": (["1", "~2", "2"], {}, ["1", "2"], [None, "1", "1"], 2),
    "after an event": (["", "8"], {"after": "7"}, ["8"], ["7", "7"], 1),
    "refused at last": (["1", "Unauthorized"], {}, ["1", "Unauthorized"], [None, "1"], 1),
    "refused at first": (["NotReady"], {}, ["NotReady"], [None], 0),
}  # fmt: skip


@pytest.mark.parametrize("case", EVENTS)
async def test_events_are_resumed_by_their_id(tmp_path: Path, kind: str, case: str) -> None:
    answers, options, expected, asked, outages = EVENTS[case]
    pending, last_ids = [*answers], []
    told: list[AgentdError] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        last_ids.append(request.headers.get("Last-Event-ID"))
        step = pending.pop(0)
        if step.isalpha():
            status = 503 if step == "NotReady" else 401
            content = {"code": step, "detail": "so", "status": status}
            return web.json_response(content, status=status)
        if step.startswith("~"):
            return web.Response(text=EVENT.format(step[1:]).removesuffix("\n"))
        return web.Response(text=EVENT.format(step) if step else ": agentd\n\n")

    async with served(tmp_path / "socket", answer):
        seen = await followed_events(
            kind, tmp_path / "socket", len(expected), told.append, **options
        )
    assert [event_id or name for name, event_id in seen] == expected
    assert last_ids == asked
    assert len(told) == outages
