"""An engine with oversized answers or malformed ids, and changes made to it by hand."""

import os
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from end_to_end.conftest import ONE_GPU
from end_to_end.test_engine_trouble import ASK, settled
from support.daemon import Daemon
from support.engine import IMAGE, Engine
from support.engine_proxy import Answer, EngineProxy
from support.waiting import until

pytestmark = pytest.mark.docker
MIB = 1 << 20


def too_much(proxy: EngineProxy, size: int, status: int | None = None) -> Answer:
    """Forward to the engine, and return far more than its answer."""

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        async with proxy.engine(request, body) as response:
            said = await response.read()
        given = web.StreamResponse(status=status or response.status)
        await given.prepare(request)
        lead = b'[{"a": "' if said.startswith(b"[") else b'{"message": "'
        await given.write(lead)
        for _ in range(size // MIB):
            await given.write(b"x" * MIB)
        await given.write_eof(b'"' + said.lstrip(b"[{"))
        return given

    return answer


def with_id(proxy: EngineProxy, container: Any) -> Answer:
    """Forward to the engine, and return another id."""

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        async with proxy.engine(request, body) as response:
            content = {**await response.json(), "Id": container}
        return web.json_response(content, status=response.status)

    return answer


def most_resident(daemon: Daemon) -> int:
    """The most memory that the daemon has had so far, in MiB."""
    assert daemon.process is not None
    lines = Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) >> 10


@pytest.mark.parametrize("container", [f"../../images/{IMAGE}", "", None, ["x"]])
async def test_an_id_that_is_a_path_removes_nothing(one_gpu, engine: Engine, container) -> None:
    daemon, proxy = one_gpu
    proxy.rule("POST .*/containers/create", with_id(proxy, container))
    answer = await daemon.create(**ASK)
    assert (answer.status, answer.json["code"]) == (503, "OutcomeUnknown")
    images = engine.call("GET", "/images/json")
    assert IMAGE in [tag for image in images for tag in image["RepoTags"]]
    assert not any("/images/" in asked for asked in proxy.asked)
    await settled(daemon, engine, containers=0, free="1")
    assert (await daemon.running(**ASK))["state"] == "running"


async def test_create_with_an_oversized_answer_is_resolved(one_gpu, engine: Engine) -> None:
    daemon, proxy = one_gpu
    before = most_resident(daemon)
    proxy.rule("POST .*/containers/create", too_much(proxy, 100 * MIB))
    answer = await daemon.create(**ASK)
    assert (answer.status, answer.json["code"]) == (503, "OutcomeUnknown")
    assert "exceeds 16 MiB" in answer.json["detail"]
    assert most_resident(daemon) - before < 100
    await settled(daemon, engine, containers=0, free="1")


@pytest.mark.parametrize("size", [3 * MIB, 100 * MIB])
async def test_an_error_of_any_length_is_cut(one_gpu, engine: Engine, size: int) -> None:
    daemon, proxy = one_gpu
    before = most_resident(daemon)
    proxy.rule("POST .*/start", too_much(proxy, size, 500))
    answer = await daemon.create(**ASK)
    assert (answer.status, answer.json["code"]) == (502, "RuntimeFailure")
    assert len(answer.content) < 3000
    assert most_resident(daemon) - before < 50
    await settled(daemon, engine, containers=0, free="1")


def by_hand(engine: Engine, daemon: Daemon, kernel: dict[str, Any], name: str) -> str:
    """Make a container with the labels of a kernel that has been removed."""
    shown = engine.call("GET", f"/containers/{kernel['container_id']}/json")
    body = {
        "Image": IMAGE,
        "Cmd": ["sleep", "1000"],
        "Labels": shown["Config"]["Labels"],
        "HostConfig": {"NetworkMode": "none"},
    }
    engine.call("DELETE", f"/containers/{kernel['container_id']}?force=1")
    return str(engine.call("POST", f"/containers/create?name={name}", body)["Id"])


async def test_a_container_made_by_hand_is_adopted_by_its_events(dockered, engine: Engine) -> None:
    engine.clean()
    await dockered.start(ONE_GPU)
    kernel = await dockered.running(**ASK)
    container = by_hand(engine, dockered, kernel, "made-by-hand")
    await dockered.until("k1", "lost")
    await dockered.call("DELETE", "/v1/kernels/k1")
    assert await dockered.free("cuda.device") == "1"
    assert [c["State"] for c in engine.containers()] == ["created"], "it never ran, and is let be"
    engine.call("POST", f"/containers/{container}/start")
    await until(lambda: dockered.call("GET", "/v1/kernels/k1"), lambda value: value.status == 200)
    adopted = await dockered.until("k1", "running")
    assert adopted["container_id"] == container
    assert await dockered.free("cuda.device") == "0"
    engine.call("POST", f"/containers/{container}/kill")
    await dockered.until("k1", "terminated")
    engine.call("DELETE", f"/containers/{container}")
    await dockered.until("k1", "lost")


async def test_a_limit_that_is_changed_by_hand_is_shown(dockered, engine: Engine) -> None:
    engine.clean()
    await dockered.start(ONE_GPU)
    kernel = await dockered.running(kernel_id="k1", slots={"cpu": 1, "mem": "64m"})
    assert kernel["degraded"] == []
    core = next(iter(kernel["allocation"]["cpu"]["cpu"]))

    async def degraded(*expected: str) -> None:
        await until(
            lambda: dockered.get("/v1/kernels/k1"), lambda value: value["degraded"] == [*expected]
        )

    async def update(**limits: Any) -> None:
        path = f"/containers/{kernel['container_id']}/update"
        assert "message" not in engine.call("POST", path, limits)

    more = {"Memory": 128 * MIB, "MemorySwap": 128 * MIB}
    await update(**more)
    memory = f"mem: limited to {128 * MIB} instead of {64 * MIB} bytes"
    await degraded(memory)
    if "cpu" not in kernel["not_enforced"] and len(os.sched_getaffinity(0)) > 1:
        await update(CpusetCpus="0-1")
        await degraded(f"cpu: runs on 0, 1 instead of {core}", memory)
        await update(CpusetCpus=core)
        await degraded(memory)
    await dockered.restart()
    await degraded(memory)
    await update(Memory=64 * MIB, MemorySwap=64 * MIB)
    await degraded()
