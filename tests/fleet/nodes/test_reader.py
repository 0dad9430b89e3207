"""The reader of one node: whatever that node answers, it reports a reason and goes on."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from agentd.client.asynchronous import AsyncClient
from agentd_fleet.nodes import reader
from agentd_fleet.nodes.reader import NodeReader
from agentd_fleet.view.reports import NodeReading
from support.stub_node import NODE_PAGES, StubNode
from support.waiting import until

OPTIONAL = {"version", "exclusive_group", "unit", "model", "runtime"}
"""Members without which a node can be read."""


class Heard:
    """The readings that a reader reported."""

    def __init__(self) -> None:
        self.readings: list[NodeReading] = []
        self.changed = asyncio.Event()

    async def told(self, reading: NodeReading) -> None:
        self.readings.append(reading)
        self.changed.set()

    async def until(self, wanted: Callable[[NodeReading], object]) -> NodeReading:
        """Wait for a reading, and forget those before it."""
        async with asyncio.timeout(20):
            while True:
                while self.readings:
                    if wanted(reading := self.readings.pop(0)):
                        return reading
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
async def node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StubNode]:
    monkeypatch.setattr(reader, "BACKOFF_S", (0.005, 0.02))
    monkeypatch.setattr(reader, "PAUSE_S", 0.0)
    monkeypatch.setattr(reader, "LEAST_S", 0.0)
    monkeypatch.setattr(reader, "PROBE_TIMEOUT_S", 1.0)
    made = StubNode(folder / "node.sock")
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def heard(node: StubNode) -> AsyncIterator[Heard]:
    made = Heard()
    async with AsyncClient(node.path, timeout_s=1.0, max_bytes=1 << 20) as client:
        reading = asyncio.create_task(NodeReader("unix:node", client, made.told).run())
        yield made
        assert not reading.done(), reading
        reading.cancel()
        await asyncio.wait([reading])


def members(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all members within a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, item in items:
        found.append((*path, key))
        if isinstance(item, (dict, list)):
            found += members(item, (*path, key))
    return found


MEMBERS = [(path, *rest) for path, answer in NODE_PAGES.items() for rest in members(answer)]
ODD: list[Any] = [None, 7, -1, 1.5, True, "", "x" * 300, "\ud800", [], {}, [[]], {"a": {}}, 10**30]


def is_good(reading: NodeReading) -> bool:
    return not reading.reason and not reading.is_down


def is_bad(reading: NodeReading) -> bool:
    return reading.reason.startswith("unreadable: ") or reading.is_down


@pytest.mark.parametrize("place", MEMBERS, ids=lambda place: ".".join(map(str, place)))
async def test_damaged_member_is_reported_and_ends_nothing(
    node: StubNode, heard: Heard, place: tuple[Any, ...]
) -> None:
    await heard.until(is_good)
    path, *between, last = place
    for odd in ("missing", *ODD):
        node.answers = copy.deepcopy(NODE_PAGES)
        holder = node.answers[path]
        for key in between:
            holder = holder[key]
        if odd == "missing":
            del holder[last]
        else:
            holder[last] = odd
        heard.readings.clear()
        node.end_streams()
        reading = await heard.until(lambda reading: "unreachable" not in reading.reason)
        is_needed = isinstance(last, str) and OPTIONAL.isdisjoint(place) and last != "cpu"
        if odd == "missing" and is_needed:
            assert is_bad(reading), (place, reading)
        json.dumps(reading.reason).encode()
        node.answers = copy.deepcopy(NODE_PAGES)
        node.end_streams()
        assert (await heard.until(is_good)).node_id == "n1"


def body(text: str | bytes, **options: Any) -> Callable[[], web.Response]:
    content = text if isinstance(text, bytes) else text.encode()
    return lambda: web.Response(body=content, **options)


WHOLE: dict[str, Callable[[], web.StreamResponse]] = {
    "html": body("<html>", content_type="text/html"),
    "other type": body('"text"', content_type="text/plain"),
    "empty": body(""),
    "null": body("null"),
    "number": body("7"),
    "deep": body("[" * 100_000),
    "deep object": body('{"a":' * 100_000),
    "bytes": body(b"\xff\xfe"),
    "cut": body('[{"id": "n1"'),
    "large": body("[" + "0," * (1 << 20) + "0]"),
    "endless": web.StreamResponse,
    "500": body("oops", status=500),
    "500 deep": body("[" * 100_000, status=500),
    "500 odd problem": body('{"code": ["x"], "detail": {}, "args": 3, "errors": 5}', status=500),
    "404": body('{"code": "NotFound", "detail": "no such path"}', status=404),
    "401": body('{"code": "Unauthorized", "detail": "unknown token"}', status=401),
    "503": body("{}", status=503, headers={"Retry-After": "9" * 5000}),
    "redirect": body("", status=302, headers={"Location": "/v1/node"}),
    "redirect to nowhere": body("", status=307, headers={"Location": "http://[:99999"}),
    "not gzip": body("[]", headers={"Content-Encoding": "gzip"}),
    "204": body("", status=204),
}


@pytest.mark.parametrize("path", [*NODE_PAGES, "/v1/events"])
@pytest.mark.parametrize("damage", WHOLE)
async def test_damaged_answer_is_reported_and_ends_nothing(
    node: StubNode, heard: Heard, path: str, damage: str
) -> None:
    await heard.until(is_good)
    node.damage = {path: WHOLE[damage]}
    node.end_streams()
    is_cut = path == "/v1/events" or damage == "not gzip"
    await heard.until(is_bad if is_cut else lambda reading: reading.reason)
    node.damage = {}
    node.end_streams()
    assert (await heard.until(is_good)).node_id == "n1"


EVENTS = {
    "not JSON": b"event: kernel\ndata: {\n\n",
    "deep": b"event: kernel\ndata: " + b"[" * 100_000 + b"\n\n",
    "bytes": b"event: \xff\ndata: \xff\n\n",
    "long": b"event: " + b"k" * (2 << 20),
}


@pytest.mark.parametrize("event", EVENTS)
async def test_damaged_event_is_reported_and_ends_nothing(
    node: StubNode, heard: Heard, event: str
) -> None:
    node.damage = {"/v1/events": body(EVENTS[event])}
    await heard.until(lambda reading: reading.reason)
    node.damage = {}
    assert is_good(await heard.until(is_good))


@pytest.mark.parametrize("backoff_s", [(0.005, 0.02), (0.0, 0.0)], ids=["fast", "slow"])
async def test_unreadable_node_is_named_and_logged_once(
    node: StubNode, monkeypatch: pytest.MonkeyPatch, backoff_s: tuple[float, float]
) -> None:
    """Its id is known, although it was never read; a slow answer outlasts every pause."""
    monkeypatch.setattr(reader, "BACKOFF_S", backoff_s)
    node.answers["/v1/slot-types"][0]["quantum"] = "colour"
    heard = Heard()
    with capture_logs() as logged:
        async with AsyncClient(node.path, timeout_s=1.0) as client:
            reading = asyncio.create_task(NodeReader("unix:node", client, heard.told).run())
            told = await heard.until(lambda reading: reading.reason)
            asked = node.asked
            await until(lambda: node.asked >= asked + 40)
            reading.cancel()
            await asyncio.wait([reading])
    assert told.node_id == "n1"
    assert told.reason.startswith("unreadable: invalid amount 'colour'")
    assert heard.readings == []
    failed = [(e["address"], e["reason"]) for e in logged if e["event"] == "node.read_failed"]
    assert failed == [("unix:node", told.reason)]
