"""An engine that dies and comes back, with its containers alive and without."""

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentd.client import AsyncClient
from agentd.errors import AgentdError, RuntimeUnavailable
from support.daemon import AGENTS, Daemon, gpus
from support.engine import IMAGE, NEEDS, Engine
from support.needs import require

pytestmark = pytest.mark.docker
BIN = Path(sys.executable).parent
KILLED = "agentd-test:killed"
"""An image whose containers are stopped by SIGKILL: an engine that starts waits 10 s for others."""
GPU = {"cuda.device": 1}
TRAP = "trap 'exit 7' USR1"


@pytest.fixture(params=[True, False], ids=["live-restore", "plain"])
async def mortal(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Daemon]:
    """agentd with two GPUs, on an engine of its own that may be killed."""
    require(*NEEDS)
    home = Path(tempfile.mkdtemp(prefix="agentd-engine-", dir="/tmp"))
    engine = Engine(home, live_restore=request.param, own_containerd=True)
    engine.start()
    engine.import_image()
    made = engine.call("POST", "/containers/create", {"Image": IMAGE, "Cmd": ["true"]})["Id"]
    path = f"/commit?container={made}&repo=agentd-test&tag=killed"
    engine.call("POST", path, {"StopSignal": "SIGKILL"})
    engine.clean()
    daemon = Daemon(folder, "docker", engine)
    await daemon.start(AGENTS + gpus(2))
    yield daemon
    await daemon.close()
    engine.clean()
    engine.end()
    shutil.rmtree(home, ignore_errors=True)


async def test_kernels_are_as_they_are_when_the_engine_is_back(mortal: Daemon) -> None:
    engine = mortal.test_engine
    one, two = [
        await mortal.trapping(TRAP, kernel_id=name, image=KILLED, slots=GPU)
        for name in ("k1", "k2")
    ]
    pids = [mortal.main_pid(kernel, engine) for kernel in (one, two)]
    await asyncio.to_thread(engine.stop, signal.SIGKILL)
    await mortal.runtime_is("unavailable", within_s=30)
    refused = await mortal.create(kernel_id="k3")
    assert (refused.status, refused.json["code"]) == (503, "RuntimeUnavailable")
    assert [k["state"] for k in await mortal.get("/v1/kernels")] == ["running", "running"]
    assert await mortal.free("cuda.device") == "0"
    os.kill(pids[0], signal.SIGUSR1)
    await asyncio.to_thread(engine.start)
    await mortal.runtime_is("available", within_s=30)
    ended = await mortal.until("k1", "terminated")
    assert ended["oom_killed"] is False
    assert ended["reason"] == "", "it ended by itself"
    if engine.live_restore:
        assert ended["exit_code"] == 7
        other = await mortal.get("/v1/kernels/k2")
        assert (other["state"], mortal.main_pid(other, engine)) == ("running", pids[1])
        assert await mortal.free("cuda.device") == "1"
    else:
        assert (await mortal.until("k2", "terminated"))["reason"] == "the engine was stopped"
        assert await mortal.free("cuda.device") == "2"
    assert (await mortal.create(kernel_id="k3", slots={"cuda.device": 1})).status == 201


async def test_kernels_name_the_engine_stop_that_ended_them(mortal: Daemon) -> None:
    engine = mortal.test_engine
    assert (await mortal.create(kernel_id="k1", command=["sh", "-c", "exit 3"])).status == 201
    await mortal.until("k1", "terminated")
    await mortal.trapping("trap 'exit 143' TERM", kernel_id="k2")
    await asyncio.to_thread(engine.stop, signal.SIGTERM)
    await mortal.runtime_is("unavailable", within_s=30)
    await asyncio.to_thread(engine.start)
    await mortal.runtime_is("available", within_s=30)
    now = {k["kernel_id"]: k for k in await mortal.get("/v1/kernels")}
    assert (now["k1"]["exit_code"], now["k1"]["reason"]) == (3, "")
    if engine.live_restore:
        assert now["k2"]["state"] == "running"
        return
    ended = await mortal.until("k2", "terminated")
    assert (ended["exit_code"], ended["reason"]) == (143, "the engine was stopped")
    await mortal.stop()
    await mortal.start()
    assert (await mortal.get("/v1/kernels/k2"))["reason"] == "the engine was stopped"


async def test_followed_log_waits_for_the_engine_that_ended(mortal: Daemon) -> None:
    path = mortal.folder / "agentd.sock"
    await mortal.trapping(TRAP, kernel_id="k1", image=KILLED)
    words = [BIN / "agentctl", "--socket", path, "logs", "-f", "k1"]
    following = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert following.stdout is not None
    assert following.stderr is not None
    assert await asyncio.wait_for(following.stdout.readline(), 20) == b"ready\n"
    told = asyncio.Queue[AgentdError]()
    async with AsyncClient(path) as node, asyncio.timeout(90):
        chunks = node.logs("k1", follow=True, on_outage=told.put_nowait)
        assert await anext(chunks) == b"ready\n"
        reading = asyncio.ensure_future(read_rest(chunks))
        await asyncio.to_thread(mortal.test_engine.stop, signal.SIGKILL)
        outage = await told.get()
        assert isinstance(outage, RuntimeUnavailable)
        assert re.match("the log of k1 was cut off before its end: ", str(outage))
        assert b"the log of k1 was cut off before its end: " in await following.stderr.readline()
        await asyncio.to_thread(mortal.test_engine.start)
        await mortal.runtime_is("available", within_s=30)
        await node.stop_kernel("k1", 0)
        assert await reading == b""
        output, errors = await following.communicate()
        assert told.empty()
    assert (following.returncode, output, errors) == (0, b"", b"")
    events = [json.loads(line) for line in mortal.log.splitlines()]
    of_logs = [e["reason"] for e in events if e["event"] == "logs.interrupted"]
    assert len(of_logs) == 2
    assert "the engine cut its response off" in of_logs[0]


async def read_rest(chunks: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in chunks])


async def test_the_reason_of_an_outage_outlives_agentd(mortal: Daemon) -> None:
    engine = mortal.test_engine
    await mortal.trapping("trap 'exit 143' TERM", kernel_id="k1")
    await asyncio.to_thread(engine.stop, signal.SIGTERM)
    await mortal.runtime_is("unavailable", within_s=30)
    await mortal.stop(signal.SIGKILL)
    await asyncio.to_thread(engine.start)
    for _ in range(2):
        await mortal.start()
        await mortal.runtime_is("available", within_s=30)
        kernel = await mortal.get("/v1/kernels/k1")
        if engine.live_restore:
            assert (kernel["state"], kernel["reason"]) == ("running", "")
        else:
            assert (kernel["exit_code"], kernel["reason"]) == (143, "the engine was stopped")
        await mortal.stop(signal.SIGKILL)
    await mortal.start()


async def test_an_engine_and_agentd_that_die_together_lose_nothing(mortal: Daemon) -> None:
    engine = mortal.test_engine
    kernel = await mortal.trapping(TRAP, kernel_id="k1", image=KILLED, slots=GPU)
    pid = mortal.main_pid(kernel, engine)
    await asyncio.to_thread(engine.stop, signal.SIGKILL)
    await mortal.stop(signal.SIGKILL)
    await mortal.start()
    assert (await mortal.get("/v1/node"))["runtime"]["state"] == "unavailable"
    assert (await mortal.call("GET", "/readyz")).status == 200
    assert (await mortal.create(slots={"cuda.device": 2})).status == 503
    await asyncio.to_thread(engine.start)
    await mortal.runtime_is("available", within_s=30)
    after = await mortal.get("/v1/kernels/k1")
    assert after["container_id"] == kernel["container_id"]
    if engine.live_restore:
        assert (after["state"], mortal.main_pid(after, engine)) == ("running", pid)
        assert await mortal.free("cuda.device") == "1"
    else:
        await mortal.until("k1", "terminated")
