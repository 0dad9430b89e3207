"""Events of a node as they happen: server-sent events and metrics."""

import asyncio
import json
import os
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from agentd.events import MAX_EVENTS
from support.daemon import Daemon

DROPPED = re.compile(r"stream\.dropped|connection\.stalled")
"""Whichever looks first lets go of a reader that takes nothing."""
IMPATIENT = {"agentd.http.connections.connection.READ_TIMEOUT_S": 1.0}


@asynccontextmanager
async def listening(
    daemon: Daemon, last_id: str | None = None, sock: str = "agentd.sock"
) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    connector = aiohttp.UnixConnector(str(daemon.folder / sock))
    headers = {"Last-Event-ID": last_id} if last_id else {}
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get("http://agentd/v1/events", headers=headers) as response,
    ):
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream"

        async def frames() -> AsyncIterator[dict[str, Any]]:
            frame: dict[str, Any] = {}
            async for raw in response.content:
                name, _, value = raw.decode().rstrip("\n").partition(": ")
                if name in ("id", "event"):
                    frame[name] = value
                elif name == "data":
                    frame[name] = json.loads(value)
                elif frame:
                    yield frame
                    frame = {}

        assert (await response.content.readline()).startswith(b":")
        yield frames()


async def until(frames: AsyncIterator[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """Return the events up to the first one with these members or this name."""
    found = []
    async with asyncio.timeout(20):
        async for frame in frames:
            found.append(frame)
            if wanted.items() <= {**frame["data"], "event": frame["event"]}.items():
                return found
    raise AssertionError(found)


async def test_the_life_of_a_kernel_is_told_in_order(daemon: Daemon) -> None:
    await daemon.start()
    async with listening(daemon) as frames:
        kernel = await daemon.running(kernel_id="k1", slots={"cuda.device": 1})
        begun = await until(frames, kernel_id="k1", state="running")
        states = [frame["data"]["state"] for frame in begun]
        (called,) = await until(frames, event="audit")
        assert called["data"] == {
            "caller": "agentd",
            "uid": os.getuid(),
            "action": "create_kernel",
            "agent_id": "agent-1",
            "kernel_id": "k1",
            "outcome": "201",
        }
        assert states == ["preparing", "creating", "running"]
        assert begun[-1]["data"] == kernel
        await daemon.call("POST", "/v1/kernels/k1/stop", {"timeout": 0})
        ended = await until(frames, state="terminated")
        assert [frame["data"]["state"] for frame in ended] == ["stopping", "terminated"]
        await daemon.call("DELETE", "/v1/kernels/k1")
        assert (await until(frames, event="audit"))[-1]["data"]["action"] == "stop_kernel"
        removed = await until(frames, event="kernel-removed")
        assert removed[-1]["data"] == {"kernel_id": "k1", "agent_id": "agent-1"}
        await daemon.call("POST", "/v1/devices/cuda/cuda0/drain")
        drained = (await until(frames, event="device"))[-1]
        assert (drained["data"]["id"], drained["data"]["state"]) == ("cuda0", "drained")


async def test_listener_resumes_or_gets_a_reset(plain: Daemon) -> None:
    await plain.start()
    async with listening(plain) as frames:
        for kernel_id in ("k1", "k2"):
            await plain.running(kernel_id=kernel_id)
        seen = await until(frames, kernel_id="k2", state="running")
    third = seen[2]
    async with listening(plain, third["id"]) as frames:
        assert await until(frames, kernel_id="k2", state="running") == seen[3:]
    for other in ("nonsense", "other-3", f"{third['id'].split('-')[0]}-99999"):
        async with listening(plain, other) as frames:
            assert (await anext(frames))["event"] == "reset"
    await plain.restart()
    async with listening(plain, third["id"]) as frames:
        assert (await anext(frames))["event"] == "reset"


async def test_stalled_event_reader_is_dropped_alone(plain: Daemon) -> None:
    plain.deadlines = IMPATIENT
    await plain.start()
    with socket.socket(socket.AF_UNIX) as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(str(plain.folder / "agentd.sock"))
        reader.sendall(b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(MAX_EVENTS // 2):
            for step in ("drain", "undrain"):
                answer = await plain.call("POST", f"/v1/devices/cuda/cuda0/{step}")
                assert answer.status == 200
            if DROPPED.search(plain.log):
                break
        async with asyncio.timeout(30):
            while not DROPPED.search(plain.log):
                await plain.call("GET", "/livez")
