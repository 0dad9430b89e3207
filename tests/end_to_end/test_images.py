"""Images from a registry: one pull for all who wait, told of, and cancelled when nobody does."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from support.daemon import AGENTS, Daemon
from support.daemon_pool import Serving
from support.engine import Engine, rootfs
from support.engine_proxy import EngineProxy
from support.registry import Registry
from support.waiting import until

pytestmark = pytest.mark.docker
LARGE = 8 << 20


async def pulling(daemon: Daemon, kernel_id: str) -> dict[str, Any]:
    """Wait until a create that was sent is pulling."""
    await until(
        lambda: daemon.call("GET", f"/v1/kernels/{kernel_id}"), lambda value: value.status != 404
    )
    return await daemon.until(kernel_id, "pulling")


async def test_pull_policies(serving_docker: Serving, registry: Registry, engine: Engine) -> None:
    dockered = await serving_docker(AGENTS)
    image = registry.image("policy", rootfs())
    never = await dockered.create(image=image, pull_policy="never")
    assert (never.status, never.json["code"]) == (422, "ImageNotFound")
    assert "pull_policy: never" in never.json["detail"]
    await dockered.running(image=image)
    old = engine.call("GET", f"/images/{image}/json")["Id"]
    registry.image("policy", rootfs(), padding=10)
    await dockered.running(image=image)
    assert engine.call("GET", f"/images/{image}/json")["Id"] == old
    await dockered.running(image=image, pull_policy="always")
    assert engine.call("GET", f"/images/{image}/json")["Id"] != old
    gone = await dockered.create(image=image.replace("policy", "nothing"), pull_policy="always")
    assert (gone.status, gone.json["code"]) == (422, "ImageNotFound")
    assert len(await dockered.get("/v1/kernels")) == 3


async def test_a_pull_is_shared_told_of_and_harms_nothing_if_it_fails(
    serving_docker: Serving, registry: Registry
) -> None:
    dockered = await serving_docker()
    registry.gate.clear()
    image = registry.image("large", rootfs(), padding=LARGE)
    bodies = [{"kernel_id": f"k{n}", "image": image, "slots": {"cuda.device": 1}} for n in (1, 2)]
    creates = [asyncio.create_task(dockered.create(**body)) for body in bodies]
    for kernel_id in ("k1", "k2"):
        kernel = await pulling(dockered, kernel_id)
        async with asyncio.timeout(20):
            while not (kernel["pull"] and kernel["pull"]["current"]):
                await asyncio.sleep(0.02)
                kernel = await dockered.get(f"/v1/kernels/{kernel_id}")
        assert LARGE < kernel["pull"]["total"] < 2 * LARGE
        assert 0 < kernel["pull"]["current"] < kernel["pull"]["total"]
    assert await dockered.free("cuda.device") == "0"
    registry.gate.set()
    answers = await asyncio.gather(*creates)
    assert [answer.status for answer in answers] == [201, 201]
    assert answers[0].json["pull"] is None
    assert registry.layers_begun == 1


async def test_pull_without_waiting_creates_is_cancelled(
    proxied: tuple[Daemon, EngineProxy],
) -> None:
    """By hanging up; the engine stops a pull whose caller is gone, when its next bytes come."""
    daemon, proxy = proxied
    hung_up = asyncio.Event()

    async def never_ends(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        line = {"status": "Downloading", "id": "a", "progressDetail": {"current": 1, "total": 9}}
        await response.write(json.dumps(line).encode() + b"\n")
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.01)
        hung_up.set()
        return response

    await daemon.start()
    proxy.rule("POST .*/images/create", never_ends)
    bodies = [{"kernel_id": f"k{n}", "image": "no:1", "slots": {"cuda.device": 1}} for n in (1, 2)]
    creates = [asyncio.create_task(daemon.create(**body)) for body in bodies]
    for kernel_id in ("k1", "k2"):
        await pulling(daemon, kernel_id)
    assert (await daemon.call("DELETE", "/v1/kernels/k1")).status == 204
    assert (await creates[0]).json["code"] == "KernelConflict"
    assert await daemon.free("cuda.device") == "1"
    assert not hung_up.is_set()
    assert (await daemon.call("DELETE", "/v1/kernels/k2")).status == 204
    await creates[1]
    async with asyncio.timeout(10):
        await hung_up.wait()
    assert await daemon.free("cuda.device") == "2"
    assert await daemon.get("/v1/kernels") == []


async def test_credentials_come_from_the_operator_s_file(dockered: Daemon, folder: Path) -> None:
    registry = Registry(login=("ada", "se:cret"))
    await registry.start()
    try:
        image = registry.image("private", rootfs())
        file = folder / "registry.json"
        file.write_text(json.dumps({"auths": {}}))
        await dockered.start(f'registry-auth = "{file}"\n' + AGENTS)
        refused = await dockered.create(image=image)
        assert (refused.status, refused.json["code"]) == (422, "ImageNotFound")
        auth = base64.b64encode(b"ada:se:cret").decode()
        file.write_text(json.dumps({"auths": {f"127.0.0.1:{registry.port}": {"auth": auth}}}))
        await dockered.running(image=image)
        file.write_text("{")
        broken = await dockered.create(image=image, pull_policy="always")
        assert "registry-auth" in broken.json["detail"]
        assert "se:cret" not in dockered.log
    finally:
        await registry.stop()


async def test_a_stop_sends_the_image_s_own_signal(
    serving_docker: Serving, registry: Registry
) -> None:
    image = registry.image("interrupted", rootfs(), settings={"StopSignal": "SIGINT"})
    dockered = await serving_docker()
    traps = "trap 'exit 5' INT; trap 'exit 6' TERM"
    await dockered.trapping(traps, kernel_id="k1", image=image)
    await dockered.trapping(traps, kernel_id="k2")
    codes = [
        (await dockered.call("POST", f"/v1/kernels/{name}/stop")).json["exit_code"]
        for name in ("k1", "k2")
    ]
    assert codes == [5, 6]
