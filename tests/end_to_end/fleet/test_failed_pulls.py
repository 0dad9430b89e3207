"""Two nodes with an engine each: the first choice cannot pull."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from end_to_end.fleet.fleet_world import GatewayProgram, World
from support.daemon import AGENTS, Daemon, gpus
from support.engine import Engine, rootfs
from support.engine_proxy import EngineProxy
from support.registry import Registry

pytestmark = pytest.mark.docker
FULL = "write /data/docker/tmp/GetImageBlob3039582: no space left on device"


@pytest.fixture
async def pair(
    engine: Engine, folder: Path, world: World
) -> AsyncIterator[tuple[GatewayProgram, EngineProxy, list[str]]]:
    """A gateway that packs, a proxy before the engine of its first choice, and both nodes."""
    proxy = EngineProxy(folder / "proxy.sock", engine.socket)
    await proxy.start()
    daemons = []
    for name, count in (("bad", 1), ("good", 4)):
        (folder / name).mkdir()
        daemon = Daemon(folder / name, "docker", engine)
        daemon.engine = proxy.path if name == "bad" else engine.socket
        daemons.append(daemon)
        await daemon.start(AGENTS + gpus(count))
    sockets = [f"unix:{daemon.folder}/agentd.sock" for daemon in daemons]
    gateway = world.gateway(
        f"[fleet]\nnodes = {json.dumps(sockets)}\n", gateway='policy = "pack"\n'
    )
    await gateway.until({daemon.node: "ready" for daemon in daemons})
    yield gateway, proxy, [daemon.node for daemon in daemons]
    proxy.clear()
    for daemon in daemons:
        await daemon.close()
    await proxy.stop()


async def test_node_with_a_full_disk_takes_no_further_create(pair, registry: Registry) -> None:
    gateway, proxy, (bad, good) = pair
    image, pulls = registry.image("fleet", rootfs()), 0

    async def is_full(_request: web.Request, _body: bytes) -> web.StreamResponse:
        nonlocal pulls
        pulls += 1
        lines = [{"status": "Pulling from fleet"}, {"errorDetail": {"message": FULL}}]
        return web.Response(text="".join(json.dumps(line) + "\n" for line in lines))

    proxy.rule("POST .*/images/create", is_full, always=True)
    order = {"image": image, "pull_policy": "always", "slots": {"cuda.device": 1}}
    for _ in range(3):
        made = await gateway.create(**order)
        assert (made.status, made.json["node_id"]) == (201, good), made.content
    assert pulls == 1
    only = await gateway.create(**order, placement={"nodes": [bad]})
    assert (only.status, only.json["code"]) == (503, "StateUnavailable")
    assert only.headers["Retry-After"]
    assert "/data" not in only.content.decode()


async def test_image_that_nobody_has_is_told_as_such(pair, registry: Registry) -> None:
    gateway, _, (bad, good) = pair
    image = registry.image("there", rootfs()).replace("there", "nowhere")
    refused = await gateway.create(image=image, slots={"cuda.device": 1})
    assert (refused.status, refused.json["code"]) == (422, "ImageNotFound")
    (row,) = refused.json["classes"]
    assert (row["reason"], set(row["nodes"])) == ("said ImageNotFound", {bad, good})
    assert refused.json["detail"].endswith(f"({row['count']} said ImageNotFound)")
