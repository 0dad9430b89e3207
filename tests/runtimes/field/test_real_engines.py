"""Real engines of several kinds: versions, stores of images, and what the host lacks."""

import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from end_to_end.containers import printed
from runtimes.field import engine_dialects as dialects
from support import engine as engines
from support.daemon import AGENTS, Daemon, gpus
from support.engine import Engine, rootfs, started_engine
from support.engine_proxy import EngineProxy
from support.needs import ENGINE_26, require
from support.registry import Registry

pytestmark = pytest.mark.docker


LACKING = """#!/bin/sh
exec unshare --mount sh -c 'umount /sys/fs/cgroup/{controller} && exec {dockerd} "$@"' sh "$@"
"""


@pytest.fixture(scope="module")
def containerd_store() -> Iterator[Engine]:
    """An engine that keeps its images in containerd, as Engine 29 does by default."""
    require(*engines.NEEDS, "engine-26")
    with started_engine(programs=ENGINE_26, containerd_store=True) as engine:
        yield engine


@pytest.fixture(params=["engine", "engine26", "containerd_store"])
def any_engine(request: pytest.FixtureRequest) -> Engine:
    return request.getfixturevalue(request.param)


@pytest.fixture
async def node(any_engine: Engine, folder: Path) -> AsyncIterator[Daemon]:
    async with node_of(any_engine, folder) as daemon:
        yield daemon


@asynccontextmanager
async def node_of(
    engine: Engine, folder: Path, docker: str = "", **environ: str
) -> AsyncIterator[Daemon]:
    daemon = Daemon(folder, "docker", engine)
    await daemon.start(docker + AGENTS + gpus(), **environ)
    try:
        yield daemon
    finally:
        await daemon.close()


async def test_image_without_a_platform_runs(node: Daemon, registry: Registry) -> None:
    """As builders of one's own write them: no operating system, no architecture."""
    await node.running(image=registry.image("home-made", rootfs(), architecture=None))


async def test_foreign_image_is_told_by_its_platform(
    node: Daemon, registry: Registry, any_engine: Engine
) -> None:
    image = registry.image("foreign", rootfs(), architecture="s390x")
    for policy in ("missing", "always"):
        answer = await node.create(image=image, pull_policy=policy, slots={"cuda.device": 1})
        assert (answer.status, answer.json["code"]) == (422, "ImageNotFound"), answer.content
        assert "its platform is linux/s390x" in answer.json["detail"]
    assert any_engine.containers() == []
    assert await node.free("cuda.device") == "2"
    assert (await node.create(image=image, platform="linux/s390x")).status == 201


async def test_foreign_image_is_replaced_by_the_node_s(node: Daemon, registry: Registry) -> None:
    image = registry.image("replaced", rootfs(), architecture="s390x")
    assert (await node.create(image=image)).status == 422
    registry.image("replaced", rootfs())
    await node.running(image=image)


@pytest.mark.parametrize("key", ["https://HOST/v2/", "HOST/namespace", "credsStore"])
async def test_private_image_is_pulled_with_the_login_of_its_host(
    any_engine: Engine, folder: Path, key: str
) -> None:
    """Engines compare the address that comes with a login, each in its own way."""
    private = Registry(login=("ada", "se:cret"))
    await private.start()
    file = folder / "registry.json"
    login = {"username": "ada", "password": "se:cret", "auth": ""}
    content = {"auths": {key.replace("HOST", f"127.0.0.1:{private.port}"): login}}
    helper = folder / "docker-credential-vault"
    helper.write_text("""#!/bin/sh\necho '{"Username": "ada", "Secret": "se:cret"}'\n""")
    helper.chmod(0o755)
    file.write_text(json.dumps({"credsStore": "vault"} if key == "credsStore" else content))
    setting, path = f'registry-auth = "{file}"\n', f"{folder}:{os.environ['PATH']}"
    try:
        image = private.image("private", rootfs())
        async with node_of(any_engine, folder, setting, PATH=path) as daemon:
            await daemon.running(image=image)
    finally:
        await private.stop()


async def test_platform_that_an_image_lacks_is_named(node: Daemon, registry: Registry) -> None:
    image = registry.image("lacking", rootfs())
    answer = await node.create(image=image, platform="linux/s390x")
    assert (answer.status, answer.json["code"]) == (422, "ImageNotFound"), answer.content
    assert "linux/s390x" in answer.json["detail"]


@pytest.mark.parametrize(("controller", "slot"), [("cpuset", "cpu"), ("memory", "mem")])
async def test_host_without_a_controller_runs_kernels(
    folder: Path, controller: str, slot: str
) -> None:
    """On cgroup v1 without the controller's hierarchy, as in rootless Docker's default."""
    require(*engines.NEEDS)
    if not Path("/sys/fs/cgroup", controller, "cgroup.procs").exists():
        pytest.skip(f"no cgroup v1 hierarchy of {controller} on this host")
    program = folder / "usr/sbin/dockerd"
    program.parent.mkdir(parents=True)
    dockerd = shutil.which("dockerd")
    program.write_text(LACKING.format(controller=controller, dockerd=dockerd))
    program.chmod(0o755)
    with started_engine(programs=folder) as engine:
        async with node_of(engine, folder) as daemon:
            kernel = await daemon.running(kernel_id="k1", slots={"cpu": 1, "mem": "64m"})
            assert kernel["not_enforced"] == [slot]
            await daemon.restart()
            kernel = await daemon.get("/v1/kernels/k1")
            assert (kernel["state"], kernel["degraded"]) == ("running", [])


async def test_members_that_an_engine_leaves_out_are_not_missed(
    engine: Engine, folder: Path
) -> None:
    proxy = EngineProxy(folder / "proxy.sock", engine.socket)
    dialects.omits_empty_members(proxy)
    await proxy.start()
    node = Daemon(folder, "docker", engine)
    node.engine = proxy.path
    try:
        await node.start(AGENTS + gpus())
        await node.running(kernel_id="k1", slots={"cuda.device": 1, "mem": "64m"})
        assert await printed(node, "echo hello") == "hello\n"
        await node.restart()
        kernel = await node.get("/v1/kernels/k1")
        assert (kernel["state"], kernel["degraded"]) == ("running", [])
        kernel = (await node.call("POST", "/v1/kernels/k1/stop")).json
        assert kernel["state"] == "terminated"
    finally:
        await node.close()
        await proxy.stop()


async def test_network_that_an_engine_lacks_is_a_condition(
    any_engine: Engine, folder: Path
) -> None:
    async with node_of(any_engine, folder, 'allowed-networks = ["team-x", "none"]\n') as daemon:
        conditions = (await daemon.get("/v1/node?check=true"))["conditions"]
    reason = "runtime.docker.allowed-networks: the engine has no network 'team-x'"
    assert [c["reason"] for c in conditions if c["about"] == "runtime/docker"] == [reason]
