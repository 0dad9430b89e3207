"""Images of other platforms, and of none, on real engines."""

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support import engine as engines
from support.daemon import AGENTS, Daemon, gpus
from support.engine import Engine, rootfs
from support.needs import ENGINE_26, require
from support.registry import Registry

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def containerd_store() -> Iterator[Engine]:
    """An engine that keeps its images in containerd, as Engine 29 does by default."""
    require(*engines.NEEDS, "engine-26")
    folder = Path(tempfile.mkdtemp(prefix="agentd-engine-", dir="/tmp"))
    running = Engine(folder, ENGINE_26, containerd_store=True)
    try:
        running.start()
        yield running
        running.clean()
    finally:
        running.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["engine", "engine26", "containerd_store"])
def any_engine(request: pytest.FixtureRequest) -> Engine:
    return request.getfixturevalue(request.param)


@pytest.fixture
async def node(any_engine: Engine, folder: Path) -> AsyncIterator[Daemon]:
    daemon = Daemon(folder, "docker", any_engine)
    await daemon.start(AGENTS + gpus())
    yield daemon
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


async def test_platform_that_an_image_lacks_is_named(node: Daemon, registry: Registry) -> None:
    image = registry.image("lacking", rootfs())
    answer = await node.create(image=image, platform="linux/s390x")
    assert (answer.status, answer.json["code"]) == (422, "ImageNotFound"), answer.content
    assert "linux/s390x" in answer.json["detail"]
