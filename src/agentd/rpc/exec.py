"""Exec: a command in a running kernel, over a WebSocket (RFC 6455).

The client's first text frame names the command. Its binary frames are input, unchanged. Binary
frames to the client begin with one byte for the stream, 1 or 2. Text frames are JSON:
`{"resize": [columns, rows]}`, `{"stdin": "closed"}` and `{"signal": "INT"}` from the client. The
last one to the client is `{"exit_code": 0}`, or `{"problem": …}` (RFC 9457) if the command did not
start. A client that disconnects ends the command.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

import msgspec
import structlog
from aiohttp import WSMessage, WSMsgType, web

from agentd.concurrency import to_the_end
from agentd.core.kernel.exec_spec import ExecSpec
from agentd.errors import AgentdError, InvalidRequest, Problem
from agentd.http.bodies import read_body
from agentd.http.connections.client_warnings import warn_of_client
from agentd.http.problems import problem_content
from agentd.http.streaming.websocket import LimitedSocket, TooManyControlFrames, probe
from agentd.rpc.requests import ExecRequest
from agentd.services.protocols import Session

log = structlog.get_logger()

FIRST_FRAME_S = 10.0
QUEUED = 4
"""Input frames that may wait for the command; signals overtake them."""
MOST_SIZE = 10_000
NO_SOCKET = "expected a WebSocket (RFC 6455): Upgrade: websocket"


async def run_over(
    request: web.Request, begin: Callable[[ExecSpec], Awaitable[Session]]
) -> web.WebSocketResponse:
    """Run a client's command and copy its input and output."""
    wire = LimitedSocket()
    if not wire.can_prepare(request).ok:
        raise InvalidRequest([Problem("Upgrade", NO_SOCKET)])
    await wire.prepare(request)
    session: Session | None = None
    flood: TooManyControlFrames | None = None
    frames = wire.frames()
    try:
        session = await begin(await _asked(frames))
        await _converse(wire, frames, session)
    except TooManyControlFrames as error:
        flood = error
        warn_of_client("exec.aborted", path=request.path, reason=str(error))
    except AgentdError as error:
        told = problem_content(error.code, str(error), error.facts())
        with suppress(ConnectionError):
            await wire.send_str(json.dumps({"problem": told}))
    except ConnectionError:
        pass  # the client disconnected
    except Exception as error:
        log.exception("exec.failed", path=request.path)
        told = problem_content("Internal", f"{type(error).__name__}; the log has more")
        with suppress(ConnectionError):
            await wire.send_str(json.dumps({"problem": told}))
    finally:
        if session is not None:
            await to_the_end(session.close())
        await wire.end(flood)
    return wire


async def _asked(frames: AsyncGenerator[WSMessage]) -> ExecSpec:
    """Read the first frame.

    Raises:
        InvalidRequest: the frame is malformed or missing.
    """
    try:
        async with asyncio.timeout(FIRST_FRAME_S):
            frame = await anext(frames, None)
    except TimeoutError:
        raise InvalidRequest([Problem("", f"no first frame in {FIRST_FRAME_S:g} s")]) from None
    if frame is None or frame.type is not WSMsgType.TEXT:
        why = 'expected a text frame: {"command": [...], "tty": false, "env": {}}'
        raise InvalidRequest([Problem("", why)])
    return read_body(ExecRequest, frame.data).to_spec()


async def _converse(
    wire: LimitedSocket, frames: AsyncGenerator[WSMessage], session: Session
) -> None:
    """Copy both directions until the command ends or the client disconnects."""
    given: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUED)
    feeding = asyncio.create_task(_feed(session, given))
    listening = asyncio.create_task(_listen(frames, session, given))
    telling = asyncio.create_task(_tell(wire, session))
    probing = asyncio.create_task(probe(wire))
    try:
        ends = [telling, listening, probing]
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (feeding, listening, telling, probing):
            task.cancel()
        await asyncio.gather(feeding, listening, telling, probing, return_exceptions=True)


async def _tell(wire: LimitedSocket, session: Session) -> None:
    """Send the output of the command, then its exit code."""
    async with aclosing(session.output()) as output:
        async for stream, data in output:
            await wire.send_bytes(bytes([stream]) + data)
    await wire.send_str(json.dumps({"exit_code": await session.ended()}))


async def _feed(session: Session, given: asyncio.Queue[bytes | None]) -> None:
    while (data := await given.get()) is not None:
        await session.write(data)
    await session.close_input()


async def _listen(
    frames: AsyncGenerator[WSMessage], session: Session, given: asyncio.Queue[bytes | None]
) -> None:
    is_closed = False
    async for frame in frames:
        if frame.type is WSMsgType.BINARY:
            if frame.data and not is_closed:
                await given.put(frame.data)
        elif (order := _order(frame.data)) != {"stdin": "closed"}:
            await _obey(session, order)
        elif not is_closed:
            is_closed = True  # input after this is ignored
            await given.put(None)


def _order(text: str) -> Mapping[str, Any]:
    """Parse a control frame.

    Raises:
        InvalidRequest: the frame is not a JSON object.
    """
    with suppress(msgspec.MsgspecError, RecursionError):
        order = msgspec.json.decode(text)
        if isinstance(order, Mapping):
            return order
    raise InvalidRequest([Problem("", "expected a JSON object")])


def _number_of(name: str) -> int | None:
    """Return the number of a signal by name (`INT` or `SIGINT`), or None if it is unknown."""
    known = signal.Signals.__members__.get(f"SIG{name.removeprefix('SIG')}")
    return None if known is None else known.value


async def _obey(session: Session, order: Mapping[str, Any]) -> None:
    match order:
        case {"resize": [int(columns), int(rows)]} if 0 < columns < MOST_SIZE > rows > 0:
            await session.resize(columns, rows)
        case {"signal": str(name)} if (number := _number_of(name)) is not None:
            await session.send_signal(number)
        case _:
            known = '{"resize": [columns, rows]}, {"stdin": "closed"}, {"signal": "INT"}'
            raise InvalidRequest([Problem("", f"expected one of {known}")])
