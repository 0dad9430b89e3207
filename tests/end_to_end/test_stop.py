"""A stop ends in time whatever hangs, names what it cancelled, and leaves what a crash would."""

import asyncio
import contextlib
import json
import signal
from typing import Any

import pytest

from end_to_end.conftest import ONE_GPU
from support.daemon import Daemon
from support.engine import Engine
from support.engine_proxy import EngineProxy
from support.waiting import until

ASK = {"kernel_id": "k1", "slots": {"cuda.device": 1}}
SHORT = {
    "agentd.program.shutdown.STOP_TIMEOUT_S": 2.0,
    "agentd.daemon.lifecycle.AFTER_DRAIN_S": 1.5,
    "agentd.daemon.lifecycle.AFTER_SERVER_S": 0.6,
    "agentd.http.server.CANCEL_TIMEOUT_S": 0.1,
    "agentd.daemon.lifecycle.AFTER_RUNTIMES_S": 0.5,
}
"""A stop whose creates have half a second, in the proportions of the product's."""


def logged(daemon: Daemon, event: str) -> dict[str, Any]:
    lines = [json.loads(line) for line in daemon.log.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event][-1]


@pytest.mark.docker
async def test_a_start_that_is_never_answered_keeps_its_kernel(
    proxied: tuple[Daemon, EngineProxy], engine: Engine
) -> None:
    engine.clean()
    daemon, proxy = proxied
    daemon.deadlines = SHORT
    await daemon.start(ONE_GPU)
    gate = asyncio.Event()
    proxy.rule("POST .*/start", proxy.stall(gate, before=False))
    caller = asyncio.create_task(daemon.create(**ASK))
    await proxy.until_asked("/start")
    assert await daemon.stop(signal.SIGTERM) == 0
    answer = await caller
    assert (answer.status, answer.json["code"]) == (503, "OutcomeUnknown")
    assert answer.json["kernel_id"] == "k1"
    assert "k1 may exist" in answer.json["detail"]
    stopped = logged(daemon, "daemon.stopped")
    assert (stopped["unresolved"], stopped.get("creates")) == (["k1"], None)
    assert len(engine.containers()) == 1
    assert (daemon.folder / "state/intents/k1.json").exists()
    gate.set()
    await daemon.start()
    assert [k["kernel_id"] for k in await daemon.get("/v1/kernels")] == ["k1"]
    assert await daemon.free("cuda.device") == "0"
    await daemon.until("k1", "running")


@pytest.mark.docker
async def test_a_pull_is_cancelled_at_once(
    proxied: tuple[Daemon, EngineProxy], engine: Engine
) -> None:
    daemon, proxy = proxied
    await daemon.start(ONE_GPU)
    gate = asyncio.Event()
    proxy.rule("POST .*/images/create", proxy.stall(gate, before=True))
    caller = asyncio.create_task(daemon.create(**ASK, image="registry.invalid/none:1"))
    await proxy.until_asked("/images/create")
    assert await daemon.stop(signal.SIGTERM) == 0
    answer = await caller
    assert (answer.status, answer.json["code"]) == (503, "Draining")
    stopped = logged(daemon, "daemon.stopped")
    assert (stopped["creates"], stopped.get("unresolved")) == (["k1"], None)
    assert not (daemon.folder / "state/intents/k1.json").exists()
    gate.set()


async def test_readers_and_half_requests_do_not_hold_up_a_stop(plain: Daemon) -> None:
    plain.deadlines = SHORT
    await plain.start(ONE_GPU)
    socket = str(plain.folder / "agentd.sock")
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(60):
            reader, writer = await asyncio.open_unix_connection(socket)
            stack.callback(writer.close)
            writer.write(b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" in await reader.readline()
        reader, writer = await asyncio.open_unix_connection(socket)
        stack.callback(writer.close)
        writer.write(b"POST /v1/agents/agent-1/kernels HTTP/1.1\r\nHost: x\r\n")
        writer.write(b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n")
        assert b"100" in await reader.readline()
        assert await plain.stop(signal.SIGTERM) == 0
    stopped = logged(plain, "daemon.stopped")
    assert stopped["requests"] == ["POST /v1/agents/agent-1/kernels"]
    assert "late" not in stopped


async def test_a_stop_during_the_start_ends_it(plain: Daemon) -> None:
    plain.configure(ONE_GPU)
    process = plain.spawn(AGENTD_FAILPOINTS="start.after_server=delay(600000)")
    await until((plain.folder / "agentd.sock").exists)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 40) == 0
    assert "daemon.ready" not in plain.log
    assert "late" not in logged(plain, "daemon.stopped")


async def test_a_stuck_event_loop_does_not_hold_up_a_stop(plain: Daemon) -> None:
    """A delay at `record.before_move` blocks the loop, as a state folder on a dead disk does."""
    plain.deadlines = {"agentd.program.shutdown.LIMIT_S": 0.5}
    await plain.start(ONE_GPU, AGENTD_FAILPOINTS="record.before_move=delay(600000)")
    caller = asyncio.create_task(plain.create(**ASK))
    await until((plain.folder / "state/kernels/k1/identity.json").exists)
    assert await plain.stop(signal.SIGTERM) == 1
    assert logged(plain, "daemon.stop_aborted")["during"] == "start"
    with contextlib.suppress(Exception):
        await caller
    await plain.start()
    assert [k["kernel_id"] for k in await plain.get("/v1/kernels")] == ["k1"]
